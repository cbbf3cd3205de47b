"""Facts about each platform (CPU, GPU, TPU): default options, memory layout and compiler options.

The package pallas_kernels decides which implementation of an op runs on which platform.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pallas_kernels.device import PLATFORMS as NAMES
from pallas_kernels.paged_attention import WHOLE_KEYS


@dataclasses.dataclass(frozen=True)
class Platform:
    """The facts about one platform.

    page_size: default number of tokens per page of the KV cache.
    dtype: dtype that "auto" means; devices without this dtype use float32.
    head_size: function from a model's head size D to the padded head size in its pages.
    stored_rows: function (rows, itemsize) -> padded rows. rows: size of an array's last axis but one; itemsize: bytes
      of an element. The device pads this axis to its tile size.
    lanes: number of elements to a multiple of which memory pads a row.
    memory_share: share of a device's memory that JAX by default gives to programs.
    most_in_8_bits: largest number of elements of 8 bits in an array that kernels index; None for no limit.
    cache_bytes: default bytes of the page pool; None for the memory that is left on the device.
    short_row: length in tokens up to which rows get a narrower block table, with faster attention; 0 for no such table.
    bandwidth: approximate bytes per second at which a forward pass reads weights, for the choice of a draft's number
      of shards.
    all_reduce: approximate seconds of a small sum over devices, for the choice of a draft's number of shards.
    prefill_tokens: default of the largest number of prompt tokens in one prefill pass, counted over all prompts; more
      would not make prefill faster.
    piece: tokens per row of a prefill pass; prompts are split into pieces of at most this size.
    least_pieces: smallest number of pieces of a prefill pass; a smaller pass would take as long.
    finer: whether a prefill pass may have 3/4 of a power of two as its number of pieces (6, 12, 24, ...), beside powers
      of two; useful where a pass takes longer with every further token.
    rounds_per_chunk: largest number of rounds of the decoding rows between two prefill passes.
    passes_in_a_row: largest number of prefill passes between two launches, if no client streams.
    max_gap_ms: default of the option max_gap_ms, in milliseconds; None for no limit.
    compiler_options: compiler options of every program.
    dense_attention: implementation of attention in training's passes without a KV cache, for a dtype of two bytes.
    text_rows: default number of rows for which training generates text at a time.
    evaluated_rows: number of rows that training evaluates at a time; None for all.
    """

    page_size: int = 16
    dtype: str = "bfloat16"
    head_size: Callable[[int], int] = lambda size: size
    stored_rows: Callable[[int, int], int] = lambda rows, itemsize: rows
    lanes: int = 1
    memory_share: float = 1.0
    most_in_8_bits: int | None = None
    cache_bytes: int | None = None
    short_row: int = 0
    bandwidth: float = 1e12
    all_reduce: float = 5e-6
    prefill_tokens: int = 2048
    piece: int = 64
    least_pieces: int = 1
    finer: bool = False
    rounds_per_chunk: int = 1
    passes_in_a_row: int = 4
    max_gap_ms: float | None = 60.0
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dense_attention: Literal["xla", "cudnn"] = "xla"
    text_rows: int = 2048
    evaluated_rows: int | None = None


MAX_ISA = "--xla_cpu_max_isa="  # flag in XLA_FLAGS that sets the largest instruction set for XLA to use


def cpu_features() -> Mapping[str, bool]:
    """Return numpy's table of CPU features, {"AVX2": True, ...}, or an empty dict if numpy has no such table.

    The table is internal to numpy, and a later version may lack it.
    """
    try:
        found: Mapping[str, bool] = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return {}
    return found


def vector_width(features: Mapping[str, bool], flags: str) -> dict[str, Any]:
    """Return a dict with XLA's compiler option for 512-bit registers, which XLA does not use by default.

    The dict is empty if the CPU has no such registers or XLA_FLAGS excludes them.

    features: CPU features, as `cpu_features` returns them.
    flags: value of the environment variable XLA_FLAGS.
    """
    limits = [flag.removeprefix(MAX_ISA).upper() for flag in flags.split() if flag.startswith(MAX_ISA)]
    allowed = not limits or limits[-1].startswith(("AVX512", "AMX"))
    return {"xla_cpu_prefer_vector_width": 512} if features.get("AVX512F") and allowed else {}


def rounded_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


CPU_COMPILER_OPTIONS = {
    # These two compiler passes scan the whole program for each layer's loop over keys. They are disabled, because they
    # take half of the compile time and make no program faster.
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,simplify-while-loops",
    # Matrix products over a few rows are loops that XLA compiles (see pallas_kernels/streamed.py). The loops are faster
    # with 512-bit registers and with reordered sums, which fast math allows. Its other relaxations stay off.
    **vector_width(cpu_features(), os.environ.get("XLA_FLAGS", "")),
    "xla_cpu_enable_fast_math": True,
    **{f"xla_cpu_fast_math_honor_{what}": True for what in ("nans", "infs", "division", "functions")},
}

# XLA would compile and time its Triton kernels for matrix products one by one. They are off, because the kernels of the
# vendor's library are as fast.
GPU_COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}

PLATFORMS = {
    "cpu": Platform(
        dtype="float32",
        bandwidth=2e10,
        all_reduce=1e-4,
        cache_bytes=1 << 30,  # fixed, modest size of the page pool, because other programs share the host's memory
        prefill_tokens=256,
        piece=16,
        finer=True,
        rounds_per_chunk=8,
        passes_in_a_row=1,
        max_gap_ms=None,  # passes take seconds; smaller ones would only read fewer tokens a second
        compiler_options=CPU_COMPILER_OPTIONS,
        text_rows=16,
        evaluated_rows=16,
    ),
    "gpu": Platform(
        head_size=lambda size: max(16, 1 << (size - 1).bit_length()),  # Triton's block sizes are powers of two
        memory_share=0.75,
        most_in_8_bits=1 << 31,  # Pallas for Triton has signed offsets of 32 bits in arrays of up to 2^32 bytes
        bandwidth=3e12,
        all_reduce=17e-6,  # seconds of a small sum over two H200 GPUs with NVLink
        short_row=WHOLE_KEYS,
        piece=32,
        least_pieces=8,  # a forward pass over these 8 * 32 = 256 tokens takes as long as reading the weights
        compiler_options=GPU_COMPILER_OPTIONS,
        dense_attention="cudnn",
    ),
    "tpu": Platform(
        page_size=32,
        head_size=lambda size: rounded_up(size, 128),  # a row narrower than a TPU's 128 lanes would take as much memory
        stored_rows=lambda rows, itemsize: rounded_up(rows, 8) if rows > 4 else max(rows, 4 // itemsize),
        lanes=128,
        text_rows=512,
    ),
}


def facts(name: str) -> Platform:
    """Return the facts about the platform of this name: "cpu", "gpu", "cuda", "rocm" or "tpu"."""
    return PLATFORMS[NAMES[name]]

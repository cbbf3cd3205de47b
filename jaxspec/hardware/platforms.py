"""Facts about each platform: default options, memory layout and compiler options.

pallas_kernels decides which form of an op runs on which platform.
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

    page_size: tokens per page.
    dtype: meaning of dtype "auto"; devices without this dtype use float32.
    head_size: function from a model's head size D to the padded head size in its pages.
    stored_heads: function from the number of keys and values per token on a device to the number that memory reserves.
    memory_share: share of a device's memory that JAX by default gives to programs.
    cache_bytes: bytes of the pages; None for the memory that is left on the device.
    short_row: length in tokens up to which rows get a narrower block table, with faster attention; 0 for no such table.
    bandwidth: approximate bytes per second at which a pass reads weights; used to choose the degree of a draft.
    all_reduce: approximate seconds of a small sum over devices; used to choose the degree of a draft.
    prefill_tokens: most prompt tokens of one pass over several prompts; more would not make it faster.
    piece: tokens per row of such a pass; prompts are split into pieces of this size.
    least_pieces: least number of pieces of a pass; fewer would not make it faster.
    finer: whether passes have 6, 12 and 24 pieces too, beside powers of two; useful if every token costs arithmetic.
    rounds_per_chunk: rounds of the decoding rows between two such passes.
    compiler_options: compiler options of every program.
    dense_attention: implementation of attention in passes without a cache, for a dtype of two bytes.
    text_rows: rows that training generates at a time.
    evaluated_rows: rows that training evaluates at a time; None for all.
    """

    page_size: int = 16
    dtype: str = "bfloat16"
    head_size: Callable[[int], int] = lambda size: size
    stored_heads: Callable[[int], int] = lambda heads: heads
    memory_share: float = 1.0
    cache_bytes: int | None = None
    short_row: int = 0
    bandwidth: float = 1e12
    all_reduce: float = 5e-6
    prefill_tokens: int = 2048
    piece: int = 64
    least_pieces: int = 1
    finer: bool = False
    rounds_per_chunk: int = 1
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dense_attention: Literal["xla", "cudnn"] = "xla"
    text_rows: int = 2048
    evaluated_rows: int | None = None


MAX_ISA = "--xla_cpu_max_isa="  # flag in XLA_FLAGS: the largest instruction set that the compiler may use


def cpu_features() -> Mapping[str, bool]:
    """Return numpy's table of CPU features, {"AVX2": True, ...}; an empty one if numpy has none.

    The table is internal to numpy, so that a later version may lack it.
    """
    try:
        found: Mapping[str, bool] = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return {}
    return found


def vector_width(features: Mapping[str, bool], flags: str) -> dict[str, Any]:
    """Return the compiler option for 512-bit registers, which the compiler does not use by default.

    Return no option if the CPU lacks them or XLA_FLAGS excludes them.
    """
    limits = [flag.removeprefix(MAX_ISA).upper() for flag in flags.split() if flag.startswith(MAX_ISA)]
    allowed = not limits or limits[-1].startswith(("AVX512", "AMX"))
    return {"xla_cpu_prefer_vector_width": 512} if features.get("AVX512F") and allowed else {}


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below the number."""
    return -(-number // multiple) * multiple


CPU_COMPILER_OPTIONS = {
    # Both passes scan the whole program for each layer's loop over keys. They take half of the compile time and make
    # no program faster.
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,simplify-while-loops",
    # Products over a few rows are loops that XLA compiles (see pallas_kernels/streamed.py). They are faster with
    # 512-bit registers and with reordered sums. The other relaxations of fast math stay off.
    **vector_width(cpu_features(), os.environ.get("XLA_FLAGS", "")),
    "xla_cpu_enable_fast_math": True,
    **{f"xla_cpu_fast_math_honor_{what}": True for what in ("nans", "infs", "division", "functions")},
}

# XLA would try out its own Triton products one by one, and the products of the library are as fast.
GPU_COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}

PLATFORMS = {
    "cpu": Platform(
        dtype="float32",
        bandwidth=2e10,
        all_reduce=1e-4,
        cache_bytes=1 << 30,  # a fixed, modest pool, because host memory is shared with other programs
        prefill_tokens=256,
        piece=16,
        finer=True,
        rounds_per_chunk=8,
        compiler_options=CPU_COMPILER_OPTIONS,
        text_rows=16,
        evaluated_rows=16,
    ),
    "gpu": Platform(
        head_size=lambda size: max(16, 1 << (size - 1).bit_length()),  # Triton blocks are powers of two
        memory_share=0.75,
        bandwidth=3e12,
        all_reduce=17e-6,  # between two H200s over NVLink
        short_row=WHOLE_KEYS,
        piece=32,
        least_pieces=8,  # a pass over 256 tokens takes as long as reading the weights
        compiler_options=GPU_COMPILER_OPTIONS,
        dense_attention="cudnn",
    ),
    "tpu": Platform(
        page_size=32,
        head_size=lambda size: rounded_up(size, 128),  # TPU lanes: a narrower row takes as much memory
        stored_heads=lambda heads: rounded_up(heads, 8) if heads > 4 else heads,
        text_rows=512,
    ),
}


def facts(name: str) -> Platform:
    """Return the facts about a platform by its name in JAX or here: "cpu", "gpu", "cuda", "rocm" or "tpu"."""
    return PLATFORMS[NAMES[name]]

"""The facts about each platform: what is chosen where nobody says otherwise, how memory lies, what its compiler is
told. Which form of an op runs where stands with the ops, in pallas_kernels."""

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
    """One platform.

    page_size: tokens of a page.
    dtype: what "auto" means; float32 on devices that lack it.
    head_size: a model's head size D -> the one of its pages.
    stored_heads: keys and values that a token has on a device -> how many its memory holds for them.
    memory_share: of a device's memory, that JAX gives to programs where nobody tells it otherwise.
    cache_bytes: of the pages; None for what is left of the device's memory.
    short_row: tokens; rows that end within have a narrower block table, whose attention is faster. 0 for none.
    bandwidth, all_reduce: bytes a second that a pass reads its weights at, and seconds that a small sum over devices
      takes, about: by which a draft's degree is chosen.
    prefill_tokens: of prompts, in one pass over several; more would make it no faster.
    piece: tokens of a row of such a pass, which a prompt is cut into.
    least_pieces: of a pass; fewer would make it no faster.
    finer: whether there are passes of 6, 12, 24 pieces, too, beside powers of two: where every token costs arithmetic.
    rounds_per_chunk: of rows that decode, between two such passes.
    compiler_options: of every program.
    dense_attention: of passes without a cache, in a dtype of two bytes.
    text_rows, evaluated_rows: that training generates, and evaluates, at a time; None for all.
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


MAX_ISA = "--xla_cpu_max_isa="  # of XLA_FLAGS: how much of the CPU the compiler may use


def cpu_features() -> Mapping[str, bool]:
    """{"AVX2": True, ...} as numpy finds them, on every system; {} where a later numpy does not say."""
    try:
        return importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return {}


def vector_width(features: Mapping[str, bool], flags: str) -> dict[str, Any]:
    """The option for registers of 512 bits, which the compiler leaves alone unless it is asked to use them; none where
    the CPU has none, or XLA_FLAGS keep the compiler from them."""
    limits = [flag.removeprefix(MAX_ISA).upper() for flag in flags.split() if flag.startswith(MAX_ISA)]
    allowed = not limits or limits[-1].startswith(("AVX512", "AMX"))
    return {"xla_cpu_prefer_vector_width": 512} if features.get("AVX512F") and allowed else {}


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# Products over a few rows are loops of the compiler's own: faster where registers of 512 bits are used, if there are
# any, and where sums may be reordered (see pallas_kernels/streamed.py). What else the compiler calls fast mathematics
# stays off. Two passes that look for what a loop need not do are left out: they go through the whole program for each
# layer's loop over keys, which is half of the compiling, and make nothing faster.
CPU_COMPILER_OPTIONS = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,simplify-while-loops",
    **vector_width(cpu_features(), os.environ.get("XLA_FLAGS", "")),
    "xla_cpu_enable_fast_math": True,
    **{f"xla_cpu_fast_math_honor_{what}": True for what in ("nans", "infs", "division", "functions")},
}

# Left out: the compiler's own kernels for products, which it tries out one by one, where the library's are as fast.
GPU_COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}

PLATFORMS = {
    "cpu": Platform(
        dtype="float32",
        bandwidth=2e10,
        all_reduce=1e-4,
        cache_bytes=1 << 30,  # host memory is shared with everything else: a fixed, modest pool
        prefill_tokens=256,
        piece=16,
        finer=True,
        rounds_per_chunk=8,
        compiler_options=CPU_COMPILER_OPTIONS,
        text_rows=16,
        evaluated_rows=16,
    ),
    "gpu": Platform(
        head_size=lambda size: max(16, 1 << (size - 1).bit_length()),  # Triton's blocks are powers of two
        memory_share=0.75,
        bandwidth=3e12,
        all_reduce=17e-6,  # two H200s, NVLink
        short_row=WHOLE_KEYS,
        piece=32,
        least_pieces=8,  # a pass over 256 tokens takes no longer than reading the weights
        compiler_options=GPU_COMPILER_OPTIONS,
        dense_attention="cudnn",
    ),
    "tpu": Platform(
        page_size=32,
        head_size=lambda size: rounded_up(size, 128),  # lanes: a narrower row takes as much memory
        stored_heads=lambda heads: rounded_up(heads, 8) if heads > 4 else heads,
        text_rows=512,
    ),
}


def facts(name: str) -> Platform:
    """Of a platform by JAX's name or ours: "cpu", "gpu", "cuda", "rocm", "tpu"."""
    return PLATFORMS[NAMES[name]]

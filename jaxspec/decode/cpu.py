"""What the compiler is told about the CPU that is there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

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

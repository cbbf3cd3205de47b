"""The dtypes of keys and values in a KV cache, by the names that the option `kv_cache_dtype` takes.

This file is plain data, so that options can be checked without importing jax.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxspec.common.values import one_of

# Name of the dtype; None for the compute dtype. The other names are those of vLLM.
KV_CACHE_DTYPES: Mapping[str, str | None] = {
    "auto": None,
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def check_kv_cache_dtype(name: str, value: str) -> None:
    """Raise UserError, which names the option, unless the value is a name in KV_CACHE_DTYPES."""
    one_of(name, value, tuple(KV_CACHE_DTYPES))

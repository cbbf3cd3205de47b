"""Compiling without the compilation cache on disk."""

from __future__ import annotations

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def no_compilation_cache():
    """Programs read from disk need not know their memory; those for a chip that is absent cannot be read at all."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax remembers whether it has one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()

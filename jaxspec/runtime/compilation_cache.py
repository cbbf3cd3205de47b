"""The folder that keeps compiled programs for later starts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from jaxspec.common.trust import cache_folder, private_folder


def enable_compilation_cache() -> Path | None:
    """Keep compiled programs under the user's cache folder, unless JAX was told another place. Return the folder for
    what else a later start need not make again; None where JAX was told another, or the folder cannot be trusted."""
    ours = cache_folder() / "xla"
    if jax.config.jax_compilation_cache_dir is None and private_folder(ours):  # type: ignore[attr-defined]
        with contextlib.suppress(ImportError):  # parts of JAX that it does not promise to keep
            from jaxspec.runtime.checked_cache import check_entries

            check_entries(ours)
        jax.config.update("jax_compilation_cache_dir", str(ours))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return cache_folder() if jax.config.jax_compilation_cache_dir == str(ours) else None  # type: ignore[attr-defined]

"""The folder that keeps compiled programs for later starts of the process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from jaxspec.common.trust import cache_folder, private_folder


def enable_compilation_cache() -> Path | None:
    """Let JAX keep compiled programs in the folder "xla" of the user's cache folder.

    Return the user's cache folder, in which callers may keep other files for later starts. Change nothing and return
    None if JAX is configured with another folder, or if another user could write to the folder "xla".
    """
    ours = cache_folder() / "xla"
    if jax.config.jax_compilation_cache_dir is None and private_folder(ours):  # type: ignore[attr-defined]
        with contextlib.suppress(ImportError):  # checked_cache imports private modules, which another JAX may lack
            from jaxspec.runtime.checked_cache import check_entries

            check_entries(ours)
        jax.config.update("jax_compilation_cache_dir", str(ours))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return cache_folder() if jax.config.jax_compilation_cache_dir == str(ours) else None  # type: ignore[attr-defined]

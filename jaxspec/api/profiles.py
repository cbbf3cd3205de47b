"""Profiler traces of host and devices, for TensorBoard or Perfetto."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax

from jaxspec.common.trust import cache_folder


class Profile:
    """The state of JAX's profiler.

    folder: folder to which the current trace will be written; None while no trace is taken.
    """

    folder: Path | None = None

    def start(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Begin a profiler trace and return its folder.

        folder: by default a new one in jaxspec's cache folder, named by the time.

        Raises: RuntimeError if a trace is being taken already.
        """
        if self.folder is not None:
            raise RuntimeError(f"a profile is being taken already, into {self.folder}: stop_profile() ends it")
        chosen = Path(folder) if folder else cache_folder() / "profiles" / time.strftime("%Y-%m-%d-%H-%M-%S")
        jax.profiler.start_trace(str(chosen))
        self.folder = chosen
        return chosen

    def stop(self) -> Path:
        """End the profiler trace, write it and return its folder. Raise RuntimeError if no trace is being taken."""
        if self.folder is None:
            raise RuntimeError("no profile is being taken: start_profile() begins one")
        folder, self.folder = self.folder, None
        jax.profiler.stop_trace()
        return folder

"""Handling of absent JAX platforms: a TPU whose library is installed, or a platform that JAX_PLATFORMS names.

Without a TPU, its library libtpu is not loaded. libtpu would search for a TPU, write error lines of its own, and print
a stack trace when SIGTERM ends the process. A missing platform in JAX_PLATFORMS is reported in one line.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOOGLE = "0x1ae0"  # PCI vendor id of Google
NO_CHIPS = ("0x01", "0x02")  # first digits of the PCI classes of disks and network cards, which Google also makes
SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # environment variables that JAX sets even without a TPU


def leave_out_absent_tpu() -> None:
    """Keep JAX from loading libtpu on a machine without a TPU. Call this before the first use of a device.

    JAX then chooses among the other platforms. Nothing is changed if libtpu is not installed, if JAX_PLATFORMS or JAX's
    setting jax_platforms is set, or if the machine may have a TPU.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None or may_have_tpu():
        return
    import jax
    from jax.extend.backend import register_backend_factory

    if jax.config.jax_platforms:  # type: ignore[attr-defined]
        return
    try:
        register_backend_factory("tpu", refuse, priority=-1, fail_quietly=True)
    except RuntimeError:  # raised if JAX uses a TPU already
        return


def refuse() -> Any:
    """Raise RuntimeError. JAX calls this function in place of the one that makes its TPU backend."""
    raise RuntimeError("this machine has no TPU")


def other_platforms(error: Exception) -> str | None:
    """Return a message if `error` means that JAX has no device because of JAX_PLATFORMS, else None.

    To name the available platforms, JAX initialises all of them. So call this only in a process that is about to end.
    """
    wanted = os.environ.get("JAX_PLATFORMS")
    frames = traceback.extract_tb(error.__traceback__)
    # JAX raises this error in its function `backends`, with no type of its own.
    if not wanted or not frames or frames[-1].name != "backends":
        return None
    import jax
    from jax.extend.backend import backends, clear_backends

    del os.environ["JAX_PLATFORMS"]
    jax.config.update("jax_platforms", "")
    # JAX may have initialised a part of the platforms in JAX_PLATFORMS. `backends` would return only those.
    clear_backends()
    leave_out_absent_tpu()
    found = ", ".join(backends())
    reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    return f"JAX_PLATFORMS={wanted!r} is not available{f' ({reason})' if reason else ''}: leave it out, or use {found}"


def may_have_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a device file, a chip on the PCI bus or an environment variable indicates a TPU.

    root: root of the file system.
    """
    variables = {name for name in environment if name.startswith("TPU_")} - SET_BY_JAX
    if variables or {"JAX_FORCE_TPU_INIT", "COLAB_TPU_ADDR"} & environment.keys():
        return True
    if any(root.glob("dev/accel[0-9]*")) or any(root.glob("dev/vfio/[0-9]*")):
        return True
    return any(is_chip(device) for device in root.glob("sys/bus/pci/devices/*"))


def is_chip(device: Path) -> bool:
    """Return whether a PCI device, given as its folder in /sys, may be a TPU chip."""
    try:
        vendor = (device / "vendor").read_text().strip()
        kind = (device / "class").read_text().strip()
    except OSError:  # a device whose files cannot be read may be a TPU chip
        return True
    return vendor == GOOGLE and not kind.startswith(NO_CHIPS)

"""Absent platforms: libtpu without a TPU, and a JAX_PLATFORMS that names a missing platform.

Without a TPU, libtpu is not loaded. It would search for one, write its own error lines, and print a stack when SIGTERM
ends the process. A missing platform in JAX_PLATFORMS is reported in one line.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOOGLE = "0x1ae0"  # PCI vendor
NO_CHIPS = ("0x01", "0x02")  # PCI classes of Google's virtual disks and network cards
SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # set by importing JAX, on any machine


def leave_out_absent_tpu() -> None:
    """Keep JAX from loading libtpu on a machine without a TPU. Call it before the first use of a device.

    JAX then chooses among the other platforms. Nothing is changed if the user set JAX_PLATFORMS or if there may be a
    TPU.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None or may_have_tpu():
        return
    import jax
    from jax.extend.backend import register_backend_factory

    if jax.config.jax_platforms:  # type: ignore[attr-defined]
        return
    try:
        register_backend_factory("tpu", refuse, priority=-1, fail_quietly=True)
    except RuntimeError:  # JAX uses a TPU already
        return


def refuse() -> Any:
    """Raise RuntimeError in place of a TPU backend."""
    raise RuntimeError("this machine has no TPU")


def other_platforms(error: Exception) -> str | None:
    """Return a message if `error` means that JAX found no device because of JAX_PLATFORMS, else None.

    JAX then initialises all platforms that it finds, to name them: call it only in a process that is about to end.
    """
    wanted = os.environ.get("JAX_PLATFORMS")
    frames = traceback.extract_tb(error.__traceback__)
    if not wanted or not frames or frames[-1].name != "backends":  # JAX raises it there, with no type of its own
        return None
    import jax
    from jax.extend.backend import backends, clear_backends

    del os.environ["JAX_PLATFORMS"]
    jax.config.update("jax_platforms", "")
    clear_backends()  # if JAX_PLATFORMS lists several, the first may have been initialised
    leave_out_absent_tpu()
    found = ", ".join(backends())
    reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    return f"JAX_PLATFORMS={wanted!r} is not available{f' ({reason})' if reason else ''}: leave it out, or use {found}"


def may_have_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a device file, a chip on the PCI bus or a variable of TPU machines hints at a TPU."""
    variables = {name for name in environment if name.startswith("TPU_")} - SET_BY_JAX
    if variables or {"JAX_FORCE_TPU_INIT", "COLAB_TPU_ADDR"} & environment.keys():
        return True
    if any(root.glob("dev/accel[0-9]*")) or any(root.glob("dev/vfio/[0-9]*")):
        return True
    return any(is_chip(device) for device in root.glob("sys/bus/pci/devices/*"))


def is_chip(device: Path) -> bool:
    """Return whether a PCI device may be a TPU chip."""
    try:
        vendor = (device / "vendor").read_text().strip()
        kind = (device / "class").read_text().strip()
    except OSError:  # unreadable: it may be one
        return True
    return vendor == GOOGLE and not kind.startswith(NO_CHIPS)

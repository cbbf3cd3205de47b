"""Platforms that are not here. libtpu is left out where no TPU is: it would look for one, write error lines of its own,
and print a stack where the process is ended by SIGTERM. What JAX_PLATFORMS asks for in vain is told in a line."""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOOGLE = "0x1ae0"
NO_CHIPS = ("0x01", "0x02")  # PCI classes of what a virtual machine of theirs has too: disks and network cards
SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # by importing it, on any machine


def leave_out_absent_tpu() -> None:
    """Call it before the first use of a device. JAX goes on to choose among what else there is; it is not told
    anything where the user did (JAX_PLATFORMS), nor where there may be a TPU."""
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None or may_have_tpu():
        return
    import jax
    from jax.extend.backend import register_backend_factory

    if jax.config.jax_platforms:  # type: ignore[attr-defined]
        return
    try:
        register_backend_factory("tpu", refuse, priority=-1, fail_quietly=True)
    except RuntimeError:  # there is one, and it is in use
        return


def refuse() -> Any:
    raise RuntimeError("this machine has no TPU")


def other_platforms(error: Exception) -> str | None:
    """What to say where JAX found no device because of JAX_PLATFORMS; None where the error is another. JAX chooses
    anew for it: only for a process that is about to end."""
    wanted = os.environ.get("JAX_PLATFORMS")
    frames = traceback.extract_tb(error.__traceback__)
    if not wanted or not frames or frames[-1].name != "backends":  # where JAX makes them: its errors have no type
        return None
    import jax
    from jax.extend.backend import backends, clear_backends

    del os.environ["JAX_PLATFORMS"]
    jax.config.update("jax_platforms", "")
    clear_backends()  # the first of several may have been there
    leave_out_absent_tpu()
    found, reason = ", ".join(backends()), str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    return f"JAX_PLATFORMS={wanted!r} cannot be had{f' ({reason})' if reason else ''}: leave it out, or use {found}"


def may_have_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether anything tells of one: a device's file, a chip on the bus, or a variable that TPU machines set."""
    told = {name for name in environment if name.startswith("TPU_")} - SET_BY_JAX
    if told or {"JAX_FORCE_TPU_INIT", "COLAB_TPU_ADDR"} & environment.keys():
        return True
    if any(root.glob("dev/accel[0-9]*")) or any(root.glob("dev/vfio/[0-9]*")):
        return True
    return any(is_chip(device) for device in root.glob("sys/bus/pci/devices/*"))


def is_chip(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:  # who knows
        return True
    return vendor == GOOGLE and not kind.startswith(NO_CHIPS)

"""Lowered programs on disk, as files of jax.export, so that a later start neither traces nor lowers them again.

The compiled programs are in JAX's own compilation cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax import export

from jaxspec.common.trust import private_folder, trusted
from jaxspec.common.writing import whole

PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints")
KERNELS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu_v2")  # custom calls whose format jax may change


@dataclasses.dataclass(frozen=True)
class Stored:
    """A program over flat arrays.

    call: function of the arrays, to be jitted and compiled.
    note: JSON data stored with the program.
    """

    call: Callable[..., Any]
    note: Any


def digest(*described: Any) -> str | None:
    """Return a digest of all that a program depends on: these descriptions, all sources, JAX's versions and settings.

    Return None if a description contains an object's address, which another process would not share.
    """
    text = json.dumps([*map(str, described), sources(), jax.__version__, jaxlib.__version__, *settings()])
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources() -> str:
    """Return a digest of all Python files of the project's packages."""
    found = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(root).rglob("*.py")):
                found.update(f"{package}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def settings() -> list[str]:
    """Return the device and the settings of JAX that change how a program is lowered."""
    device = jax.devices()[0]
    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
    return [device.platform, device.device_kind, *(str(getattr(jax.config, name)) for name in names)]


def load(folder: Path, name: str) -> Stored | None:
    """Return a program; None if there is none, if it is damaged, or if another user could have written it."""
    try:
        with trusted(folder / name) as file:
            header, _, blob = file.read().partition(b"\n")
        known = json.loads(header)
        if hashlib.sha256(blob).hexdigest() != known["sha256"]:
            return None
        return Stored(export.deserialize(bytearray(blob)).call, known["note"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def exported(program: Any, arrays: Sequence[Any]) -> export.Exported:
    """Export the jitted program for these arrays."""
    allowed = [export.DisabledSafetyCheck.custom_call(kernel) for kernel in KERNELS]
    platform = next(iter(arrays[0].sharding.device_set)).platform
    platforms = None  # the default backend's
    if platform != jax.devices()[0].platform:
        platforms = ["cuda" if platform == "gpu" else platform]
    return export.export(program, platforms=platforms, disabled_checks=allowed)(*arrays)


def store(folder: Path, name: str, program: export.Exported, note: Any) -> None:
    """Write a program and its note for later starts. A failure to write is ignored."""
    blob = bytes(program.serialize())
    header = json.dumps({"sha256": hashlib.sha256(blob).hexdigest(), "note": note})
    keep(folder / name, lambda new: new.write_bytes(header.encode() + b"\n" + blob))


def keep(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file for later starts by write(temporary path). A failure to write is ignored."""
    if private_folder(path.parent):
        with contextlib.suppress(OSError), whole(path) as new:
            write(new)
            new.chmod(0o600)

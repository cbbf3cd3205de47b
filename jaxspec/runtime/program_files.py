"""Lowered programs on disk, in the format of jax.export. A later start of the process need not trace and lower them.

These files hold no compiled programs; those are in JAX's own compilation cache.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax import export

from jaxspec.common.trust import keep, trusted

PACKAGES = ("jaxspec", "pallas_kernels", "checkpoints")
# Names of the custom calls of GPU kernels. By default jax.export refuses them, because later versions of JAX may change
# their format.
KERNELS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu_v2")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A lowered program whose arguments and results are lists of arrays, not pytrees.

    call: function of the arrays, to be jitted and compiled.
    note: JSON data stored with the program.
    """

    call: Callable[..., Any]
    note: Any


def digest(*described: Any) -> str | None:
    """Return a digest of all that a program depends on: these objects, all sources, JAX's versions and settings.

    described: objects whose str() describes the program. Return None if one of these strings contains an object's
      address in memory, which differs between processes.
    """
    text = json.dumps([*map(str, described), sources(), jax.__version__, jaxlib.version.__version__, *settings()])
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources() -> str:
    """Return a digest of all Python files of the packages in PACKAGES."""
    found = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(root).rglob("*.py")):
                found.update(f"{package}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def settings() -> list[str]:
    """Return the first device's platform and kind, and settings of JAX that change how a program is lowered."""
    device = jax.devices()[0]
    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
    return [device.platform, device.device_kind, *(str(getattr(jax.config, name)) for name in names)]


def load(folder: Path, name: str) -> Stored | None:
    """Return the program in a file; None if the file is missing or damaged, or if another user could write it."""
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
    """Return the export (jax.export) of the jitted program for arguments with the shapes and shardings of `arrays`."""
    allowed = [export.DisabledSafetyCheck.custom_call(kernel) for kernel in KERNELS]
    platform = next(iter(arrays[0].sharding.device_set)).platform
    platforms = None  # None: the platform of JAX's default backend
    if platform != jax.devices()[0].platform:
        platforms = ["cuda" if platform == "gpu" else platform]
    return export.export(program, platforms=platforms, disabled_checks=allowed)(*arrays)


def store(folder: Path, name: str, program: export.Exported, note: Any) -> None:
    """Write an exported program and its note to a file for later starts. A failure to write is ignored."""
    blob = bytes(program.serialize())
    header = json.dumps({"sha256": hashlib.sha256(blob).hexdigest(), "note": note})
    keep(folder / name, lambda new: new.write_bytes(header.encode() + b"\n" + blob))

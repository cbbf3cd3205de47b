"""Accelerators by name, whether they are here or not: what their makers' data sheets say."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxspec.common.errors import UserError, quoted

if TYPE_CHECKING:  # the command line names accelerators before it loads anything
    from pallas_kernels.device import Device


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One by its data sheet.

    name: as `jaxspec info --device` and `--chips` know it.
    platform: "gpu" or "tpu".
    memory: bytes; a data sheet's GB are 10^9, a little less than programs find.
    bandwidth: of it, bytes a second.
    capability: of CUDA, (major, minor).
    host: the most of them in one host.
    axes: of the grid that several are wired as; 1 where they are only counted.
    """

    name: str
    platform: str
    memory: int
    bandwidth: int
    capability: tuple[int, int] | None = None
    host: int = 8
    axes: int = 1

    @property
    def programs_memory(self) -> int:
        """Bytes that JAX gives to programs where nobody tells it otherwise."""
        from jaxspec.hardware.platforms import facts

        return int(self.memory * facts(self.platform).memory_share)

    @property
    def device(self) -> Device:
        """What it is to programs."""
        from pallas_kernels.device import Device

        return Device(self.platform, self.capability, self.name)


def gpu(name: str, memory_gb: float, bandwidth_gb_s: float, *capability: int, host: int = 8) -> Accelerator:
    cuda = (capability[0], capability[1])
    return Accelerator(name, "gpu", int(memory_gb * 1e9), int(bandwidth_gb_s * 1e9), cuda, host)


def tpu(name: str, memory_gb: float, bandwidth_gb_s: float, host: int, axes: int) -> Accelerator:
    return Accelerator(name, "tpu", int(memory_gb * 1e9), int(bandwidth_gb_s * 1e9), host=host, axes=axes)


# Of GPUs that come as a card and as a module, the module's bandwidth. A chip of a TPU, of a B200 board one GPU.
# A host has as many as the largest that is sold.
KNOWN = (
    gpu("T4", 16, 320, 7, 5),
    gpu("L4", 24, 300, 8, 9),
    gpu("A100-40GB", 40, 1555, 8, 0, host=16),
    gpu("A100-80GB", 80, 2039, 8, 0),
    gpu("H100", 80, 3350, 9, 0),
    gpu("H200", 141, 4800, 9, 0),
    gpu("B200", 180, 8000, 10, 0),
    tpu("v4", 32, 1228, host=4, axes=3),
    tpu("v5e", 16, 819, host=8, axes=2),
    tpu("v5p", 95, 2765, host=4, axes=3),
    tpu("v6e", 32, 1640, host=8, axes=2),
)
ACCELERATORS = {known.name: known for known in KNOWN}


def accelerator(name: str, option: str = "--device") -> Accelerator:
    """ "l4" and "TPU v5e" are found, too. Raises UserError for what is not listed; option: that named it."""
    wanted = name.casefold().removeprefix("tpu").removeprefix("nvidia").strip(" -")
    for known in KNOWN:
        if wanted == known.name.casefold():
            return known
    raise UserError(f"{option} {quoted(name)} is unknown: use one of {', '.join(ACCELERATORS)}")

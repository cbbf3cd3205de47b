"""Table of accelerators, with figures from their makers' data sheets. No accelerator needs to be present."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxspec.common.errors import UserError, quoted

if TYPE_CHECKING:  # the command line reads the accelerators' names, and must not load JAX for that
    from pallas_kernels.device import Device


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A type of accelerator, with figures from its data sheet.

    name: name for `jaxspec info --device` and `--chips`.
    platform: "gpu" or "tpu".
    memory: memory in bytes; a GB of the data sheet counts as 10^9 bytes, a little less than programs find.
    available: bytes that the TPU compiler lets programs use; None if it is not known.
    bandwidth: memory bandwidth in bytes per second.
    capability: CUDA compute capability, (major, minor); None for a TPU.
    host: largest number of these accelerators in one host.
    axes: number of dimensions of the grid that connects several accelerators; 1 if only their number matters.
    """

    name: str
    platform: str
    memory: int
    bandwidth: int
    capability: tuple[int, int] | None = None
    host: int = 8
    axes: int = 1
    available: int | None = None

    @property
    def programs_memory(self) -> int:
        """Number of bytes of the memory that JAX by default gives to programs."""
        from jaxspec.hardware.platforms import facts

        return self.available or int(self.memory * facts(self.platform).memory_share)

    @property
    def device(self) -> Device:
        """This accelerator as the Device for which programs are compiled."""
        from pallas_kernels.device import Device

        return Device(self.platform, self.capability, self.name)


def gpu(name: str, memory_gb: float, bandwidth_gb_s: float, *capability: int, host: int = 8) -> Accelerator:
    """Return a GPU with this memory in GB, bandwidth in GB/s and compute capability (two integers).

    host: number of GPUs of the largest host that is sold.
    """
    cuda = (capability[0], capability[1])
    return Accelerator(name, "gpu", int(memory_gb * 1e9), int(bandwidth_gb_s * 1e9), cuda, host)


def tpu(
    name: str, memory_gb: float, bandwidth_gb_s: float, host: int, axes: int, available_gib: float | None = None
) -> Accelerator:
    """Return a TPU with this memory in GB and bandwidth in GB/s, per chip.

    available_gib: the "available HBM" in the TPU compiler's error for a program that is too large.
    """
    available = int(available_gib * 2**30) if available_gib else None
    sizes = int(memory_gb * 1e9), int(bandwidth_gb_s * 1e9)
    return Accelerator(name, "tpu", *sizes, host=host, axes=axes, available=available)


# For a GPU that is sold as a card and as a module, the bandwidth is the module's. A TPU's figures are per chip, those
# of a B200 board per GPU. `host` is the number of accelerators in the largest host that is sold.
KNOWN = (
    gpu("T4", 16, 320, 7, 5),
    gpu("L4", 24, 300, 8, 9),
    gpu("A100-40GB", 40, 1555, 8, 0, host=16),
    gpu("A100-80GB", 80, 2039, 8, 0),
    gpu("H100", 80, 3350, 9, 0),
    gpu("H200", 141, 4800, 9, 0),
    gpu("B200", 180, 8000, 10, 0),
    tpu("v4", 32, 1228, host=4, axes=3),
    tpu("v5e", 16, 819, host=8, axes=2, available_gib=15.75),
    tpu("v5p", 95, 2765, host=4, axes=3, available_gib=95.74),
    tpu("v6e", 32, 1640, host=8, axes=2, available_gib=31.25),
)
ACCELERATORS = {known.name: known for known in KNOWN}


def accelerator(name: str, option: str = "--device") -> Accelerator:
    """Return the accelerator of this name; forms like "l4" and "TPU v5e" are accepted.

    option: command-line option that gave the name.

    Raises: UserError for an unknown name.
    """
    wanted = name.casefold().removeprefix("tpu").removeprefix("nvidia").strip(" -")
    for known in KNOWN:
        if wanted == known.name.casefold():
            return known
    raise UserError(f"{option} {quoted(name)} is unknown: use one of {', '.join(ACCELERATORS)}")

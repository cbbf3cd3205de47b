"""Descriptions of the devices that programs are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}  # platforms by JAX's names
NAMES = tuple(dict.fromkeys(PLATFORMS.values()))
AMPERE = (8, 0)  # compute capability of NVIDIA's Ampere GPUs


@dataclasses.dataclass(frozen=True)
class Device:
    """A device's platform and, for a GPU, its abilities.

    A GPU whose compute capability is unknown is assumed to have none of these abilities.

    platform: "cpu", "gpu" or "tpu".
    capability: CUDA's compute capability, (major, minor); None if the device has none or if it is unknown.
    kind: the vendor's name of the device, for messages.
    """

    platform: str
    capability: tuple[int, int] | None = None
    kind: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.platform not in NAMES:
            raise ValueError(f"platform {self.platform!r} is not one of {', '.join(NAMES)}")

    def reaches(self, *capability: int) -> bool:
        """Return whether the device is known to be a GPU of this compute capability or a higher one."""
        return self.platform == "gpu" and self.capability is not None and self.capability >= capability

    @property
    def has_triton(self) -> bool:
        """Return whether the device is a GPU with bfloat16 and with support for Triton, which compiles the kernels.

        NVIDIA's GPUs have both from Ampere on. A T4 has neither.
        """
        return self.reaches(*AMPERE)

    @property
    def lacks_bfloat16(self) -> bool:
        """Return whether the device is known to lack bfloat16, as NVIDIA's GPUs before Ampere do."""
        return self.platform == "gpu" and self.capability is not None and self.capability < AMPERE

    @property
    def starts_early(self) -> bool:
        """Return whether a kernel can let the next kernel start early, which Hopper and later GPUs support."""
        return self.reaches(9, 0)

    @property
    def shares_much(self) -> bool:
        """Return whether a thread block can have 227 KB of shared memory, and whether matrix units read from it.

        This holds for Hopper and the large Blackwell GPUs. The small Blackwell GPUs have 99 KB. Kernels that are
        interpreted on CPU have no such limit, so the result for CPU is True.
        """
        return self.platform == "cpu" or (self.reaches(9, 0) and not self.reaches(11, 0))

    @property
    def interpret(self) -> Any:
        """The option `interpret` of `pallas_call`, which is True on CPU because Pallas has no compiler for CPU."""
        return self.platform == "cpu"

    def no_kernels(self) -> str:
        """Return the reason why kernels cannot run on this GPU, for messages."""
        needed = ".".join(map(str, AMPERE))
        found = ".".join(map(str, self.capability)) if self.capability else "none that is known"
        return f"kernels need a GPU of compute capability {needed}, {self.kind or 'this one'} has {found}"


CPU = Device("cpu")


def here() -> Device:
    """Return the description of the first device of JAX's default backend."""
    return of(jax.devices()[0])


def of(device: jax.Device) -> Device:
    """Return the description of a JAX device.

    AMD's GPUs report an architecture, such as "gfx942", in place of a compute capability. Their capability is None.
    """
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Device(PLATFORMS[device.platform], capability, device.device_kind)


def named(platform: str | Device | None) -> Device:
    """Return the description of a device, given the name of its platform.

    Args:
      platform: "cpu", "gpu", "tpu" (or JAX's name of the platform), a `Device`, or None. A `Device` is returned as it
        is. None, or the platform of JAX's default backend, gives that backend's first device. "gpu" on another backend
        gives a GPU of Ampere's compute capability.

    Raises:
      ValueError: the name is not that of a platform.
    """
    if isinstance(platform, Device):
        return platform
    found = here()
    if platform is None or PLATFORMS.get(platform) == found.platform:
        return found
    name = PLATFORMS.get(platform, platform)
    return Device(name, AMPERE if name == "gpu" else None)

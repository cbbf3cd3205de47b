"""The devices that programs are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}  # JAX's names, and ours
NAMES = tuple(dict.fromkeys(PLATFORMS.values()))
AMPERE = (8, 0)  # compute capability


@dataclasses.dataclass(frozen=True)
class Device:
    """A platform and, for a GPU, its abilities. Nothing is assumed of a GPU whose capability is unknown.

    platform: "cpu", "gpu" or "tpu".
    capability: CUDA's compute capability, (major, minor); None if the device has none, or if it is unknown.
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
        """Return whether the device is a GPU with Triton, the language of the kernels, and with bfloat16.

        NVIDIA's GPUs have both from Ampere on. A T4 has neither.
        """
        return self.reaches(*AMPERE)

    @property
    def lacks_bfloat16(self) -> bool:
        """Return whether the device is known to have no bfloat16, as NVIDIA's GPUs before Ampere."""
        return self.platform == "gpu" and self.capability is not None and self.capability < AMPERE

    @property
    def starts_early(self) -> bool:
        """Return whether a kernel can let the next kernel start early: on GPUs from Hopper on."""
        return self.reaches(9, 0)

    @property
    def shares_much(self) -> bool:
        """Return whether a program has up to 227 KB of shared memory, and matrix units that read from that memory.

        Hopper and the large Blackwell GPUs do; the small Blackwell GPUs have 99 KB. Kernels interpreted on CPU have no
        such limit.
        """
        return self.platform == "cpu" or (self.reaches(9, 0) and not self.reaches(11, 0))

    @property
    def interpret(self) -> Any:
        """The `interpret` option of `pallas_call`: True on CPU, for which Pallas has no compiler."""
        return self.platform == "cpu"

    def no_kernels(self) -> str:
        """Return the reason why a GPU has no kernels, for messages."""
        needed = ".".join(map(str, AMPERE))
        found = ".".join(map(str, self.capability)) if self.capability else "none that is known"
        return f"kernels need a GPU of compute capability {needed}, {self.kind or 'this one'} has {found}"


CPU = Device("cpu")


def here() -> Device:
    """Return the first device of the default backend."""
    return of(jax.devices()[0])


def of(device: jax.Device) -> Device:
    """Return the description of a JAX device.

    AMD's GPUs report an architecture, such as "gfx942", and no compute capability.
    """
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Device(PLATFORMS[device.platform], capability, device.device_kind)


def named(platform: str | Device | None) -> Device:
    """Return a device by the name of its platform.

    Args:
      platform: "cpu", "gpu", "tpu" (or JAX's name of it), a `Device`, which is returned as it is, or None. None and the
        platform of the default backend give that backend's first device. "gpu" on another backend gives a GPU of
        Ampere's capability.

    Raises:
      ValueError: another name.
    """
    if isinstance(platform, Device):
        return platform
    found = here()
    if platform is None or PLATFORMS.get(platform) == found.platform:
        return found
    name = PLATFORMS.get(platform, platform)
    return Device(name, AMPERE if name == "gpu" else None)

"""What programs are compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}  # JAX's names -> ours
NAMES = tuple(dict.fromkeys(PLATFORMS.values()))
AMPERE = (8, 0)


@dataclasses.dataclass(frozen=True)
class Device:
    """A platform and, of a GPU, what it can do. What is unknown of a GPU is not taken for granted.

    platform: "cpu", "gpu" or "tpu".
    capability: CUDA's compute capability, (major, minor); None for a GPU that has none, or whose is unknown.
    kind: the maker's name, for messages.
    """

    platform: str
    capability: tuple[int, int] | None = None
    kind: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.platform not in NAMES:
            raise ValueError(f"platform {self.platform!r} is not one of {', '.join(NAMES)}")

    def reaches(self, *capability: int) -> bool:
        """Return whether it is known to be a GPU of this compute capability or a higher one."""
        return self.platform == "gpu" and self.capability is not None and self.capability >= capability

    @property
    def has_triton(self) -> bool:
        """Whether it is a GPU with Triton, which the kernels are written in, and with bfloat16: NVIDIA's from Ampere
        on. A T4 has neither."""
        return self.reaches(*AMPERE)

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether it is known to have no bfloat16: NVIDIA's GPUs before Ampere."""
        return self.platform == "gpu" and self.capability is not None and self.capability < AMPERE

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can ask for the next one: from Hopper on."""
        return self.reaches(9, 0)

    @property
    def shares_much(self) -> bool:
        """Whether a program can have 227 KB of shared memory, and matrix units that read from it: Hopper and
        Blackwell, but for Blackwell's smaller ones, which have 99 KB. Interpreted, nothing is short."""
        return self.platform == "cpu" or (self.reaches(9, 0) and not self.reaches(11, 0))

    @property
    def interpret(self) -> Any:
        """For `pallas_call`: there is no Pallas compiler for CPU."""
        return self.platform == "cpu"

    def no_kernels(self) -> str:
        """Return why a GPU has no kernels, for messages."""
        needed, found = (
            ".".join(map(str, version or ("none that is known",))) for version in (AMPERE, self.capability)
        )
        return f"kernels need a GPU of compute capability {needed}, {self.kind or 'this one'} has {found}"


CPU = Device("cpu")


def here() -> Device:
    """The first device of the default backend."""
    return of(jax.devices()[0])


def of(device: jax.Device) -> Device:
    """Return what a device of JAX is. AMD's GPUs report an architecture, such as "gfx942", and no capability."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Device(PLATFORMS[device.platform], capability, device.device_kind)


def named(platform: str | Device | None) -> Device:
    """Return a device by name. None: the default backend's. "cpu", "gpu", "tpu": the one that is here; of a GPU that is
    not here, one of Ampere. Raise ValueError for other names."""
    if isinstance(platform, Device):
        return platform
    found = here()
    if platform is None or PLATFORMS.get(platform) == found.platform:
        return found
    name = PLATFORMS.get(platform, platform)
    return Device(name, AMPERE if name == "gpu" else None)

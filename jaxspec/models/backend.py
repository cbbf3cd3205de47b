"""Backend: the device, the placement over devices, and the choice of kernels that a program is compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxspec.common.errors import UserError
from jaxspec.parallel.placement import Placement
from pallas_kernels.device import Device


@dataclasses.dataclass(frozen=True)
class Backend:
    """Static facts about where a program runs: its device, the model's placement and the choice of kernels.

    device: the device that the program is compiled for.
    placement: placement of the model over devices; None on a single device.
    kernels: value of the option `kernels` of EngineConfig; None lets each op choose its implementation.
    dense_attention: implementation of attention in passes without a KV cache.
    """

    device: Device
    placement: Placement | None = None
    kernels: str | None = None
    dense_attention: Literal["xla", "cudnn"] = "xla"

    def __post_init__(self) -> None:
        if self.kernels == "pallas" and self.device.platform == "gpu" and not self.device.has_triton:
            raise UserError(
                f"kernels='pallas': {self.device.no_kernels()}; leave the option kernels out, plain forms are used "
                "there"
            )

    @property
    def alone(self) -> bool:
        """Return whether the program runs on a single device."""
        return self.placement is None or self.placement.alone

    @property
    def streams(self) -> bool:
        """Return whether matrix products read weights stored with the output axis first (`jaxspec.models.storage`)."""
        return self.device.platform == "cpu" and self.kernels is None and self.alone

    @property
    def interleaves(self) -> bool:
        """Return whether kernels read 8-bit and 4-bit weights with reordered inputs (`jaxspec.models.storage`)."""
        return self.device.platform == "gpu" and self.device.shares_much and self.kernels != "reference"

    @property
    def degree(self) -> int:
        """Number of devices that the model is sharded over."""
        return 1 if self.placement is None else self.placement.degree

    def vocab_placement(self, vocab_size: int) -> Placement | None:
        """Return the placement over which a vocabulary of this size is sharded; None if it is replicated."""
        sharded = self.placement is not None and self.degree > 1 and self.placement.divides(vocab_size)
        return self.placement if sharded else None

    @property
    def sum_over(self) -> tuple[str, ...]:
        """Names of the mesh axes over which partial sums are added up (`Placement.sum_over`)."""
        return () if self.placement is None else self.placement.sum_over

    def how(self) -> dict[str, Any]:
        """Return the keyword arguments platform and implementation for the ops of pallas_kernels."""
        plain = not self.alone and self.device.platform == "cpu"  # several CPU devices run only "reference"
        return {"platform": self.device, "implementation": "reference" if plain else self.kernels}

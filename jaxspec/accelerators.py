"""Accelerators by name, whether they are here or not: what their makers' data sheets say."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """memory: bytes, a data sheet's GB being 10^9, a little less than programs find; bandwidth: of it, bytes a second.
    capability: of CUDA, (major, minor)."""

    platform: str
    memory: int
    bandwidth: int
    capability: tuple[int, int] | None = None

    @property
    def programs_memory(self) -> int:
        """Bytes that JAX gives to programs where nobody tells it otherwise."""
        return int(self.memory * (0.75 if self.platform == "gpu" else 1))


def gpu(memory_gb: float, bandwidth_gb_s: float, *capability: int) -> Accelerator:
    return Accelerator("gpu", int(memory_gb * 1e9), int(bandwidth_gb_s * 1e9), (capability[0], capability[1]))


def tpu(memory_gb: float, bandwidth_gb_s: float) -> Accelerator:
    return Accelerator("tpu", int(memory_gb * 1e9), int(bandwidth_gb_s * 1e9))


# Of GPUs that come as a card and as a module, the module's bandwidth. A chip of a TPU, of a B200 board one GPU.
ACCELERATORS = {
    "T4": gpu(16, 320, 7, 5),
    "L4": gpu(24, 300, 8, 9),
    "A100-40GB": gpu(40, 1555, 8, 0),
    "A100-80GB": gpu(80, 2039, 8, 0),
    "H100": gpu(80, 3350, 9, 0),
    "H200": gpu(141, 4800, 9, 0),
    "B200": gpu(180, 8000, 10, 0),
    "v4": tpu(32, 1228),
    "v5e": tpu(16, 819),
    "v5p": tpu(95, 2765),
    "v6e": tpu(32, 1640),
}


def accelerator(name: str) -> tuple[str, Accelerator]:
    """(its name as it is written here, its facts); "l4" and "TPU v5e" are found too. Raises ValueError for others."""
    wanted = name.casefold().removeprefix("tpu").removeprefix("nvidia").strip(" -")
    for known, facts in ACCELERATORS.items():
        if wanted == known.casefold():
            return known, facts
    raise ValueError(f"--device {name!r} is unknown: use one of {', '.join(ACCELERATORS)}")

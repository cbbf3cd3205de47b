"""Where a model lies: the device mesh, and the axes of it over which the model is cut."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.common.errors import UserError

# Tensor parallelism is factorised: the target is cut over both axes, a draft of smaller degree over the first.
AXES = ("tp_draft", "tp_rest")
CUT = frozenset({"vocab", "heads", "mlp", "features"})  # logical axes that are cut


@dataclasses.dataclass(frozen=True)
class Placement:
    """mesh: of all devices of a program. axes: those over which this model's arrays are cut; along the others every
    device has the same."""

    mesh: Mesh
    axes: tuple[str, ...] = AXES

    @property
    def degree(self) -> int:
        """Into how many parts it is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def alone(self) -> bool:
        """Whether there is a single device."""
        return self.mesh.size == 1

    @property
    def first_device(self) -> Any:
        """Of this process."""
        return self.mesh.local_devices[0]

    @property
    def draft(self) -> Placement:
        """Of a draft beside this target."""
        return dataclasses.replace(self, axes=AXES[:1])

    @property
    def sum_over(self) -> tuple[str, ...]:
        """The axes over which partial sums are to be added up; none where there are none."""
        return self.axes if self.degree > 1 else ()

    def sharding(self, spec: P = P()) -> NamedSharding:
        """By default whole on every device."""
        return NamedSharding(self.mesh, spec)

    def cut(self, axes: Sequence[str | None]) -> P:
        """How an array with these logical axes is cut; None is not."""
        return P(*(self.axes if axis in CUT else None for axis in axes))

    def divides(self, vocab_size: int) -> bool:
        """Whether a vocabulary of this size is cut; one that does not divide evenly is replicated."""
        return vocab_size % self.degree == 0

    def of_parameter(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Where a parameter lies. Heads must divide, vocabularies need not."""
        whole = lambda axis, size: axis == "vocab" and not self.divides(size)
        return self.sharding(self.cut([None if whole(*dim) else dim[0] for dim in zip(axes, shape, strict=True)]))

    @property
    def of_heads(self) -> P:
        """[B, T, H * D]."""
        return P(None, None, self.axes)

    @property
    def of_pages(self) -> P:
        """[P, S, 2G, D]."""
        return P(None, None, self.axes, None)

    @property
    def of_features(self) -> P:
        """[P, S, M]."""
        return P(None, None, self.axes)


def make_placement(
    tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None, *, draft_size: int | None = None
) -> Placement:
    """A target over the first devices, of several processes as many of each, whose draft (`Placement.draft`) is cut
    into draft_size parts, as many by default.

    Raises: UserError when there are fewer devices than asked for, or draft_size does not divide them.
    """
    devices = list(jax.devices() if devices is None else devices)
    size = tensor_parallel_size
    if not 1 <= size <= len(devices):
        raise UserError(f"tensor_parallel_size={size} needs that many devices, {len(devices)} found: lower it")
    draft_size = size if draft_size is None else draft_size
    check_draft_size(draft_size, size)
    # The parts of a draft lie side by side, within a process where they can.
    grid = np.array(shared(devices, size)).reshape(size // draft_size, draft_size).T
    return Placement(Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2))


def check_draft_size(draft_size: int, size: int) -> None:
    """Raises UserError unless a draft can be cut into so many parts beside a target in `size`."""
    if draft_size < 1 or size % draft_size:
        able = ", ".join(map(str, divisors(size)))
        raise UserError(
            f"draft_tensor_parallel_size={draft_size} does not divide tensor_parallel_size={size}: use one of {able}"
        )


def shared(devices: Sequence[Any], size: int) -> list[Any]:
    """So many of them, of each process as many. Raises UserError where that is not possible."""
    of: dict[int, list[Any]] = {}
    for device in devices:
        of.setdefault(device.process_index, []).append(device)
    each = size // len(of)
    if size % len(of) or each > min(map(len, of.values())):
        most = min(map(len, of.values()))
        able = ", ".join(str(n * len(of)) for n in range(1, most + 1))
        raise UserError(
            f"tensor_parallel_size={size} cannot be shared evenly by {len(of)} processes with {most} devices: use one "
            f"of {able}"
        )
    return [device for mine in of.values() for device in mine[:each]]


def absent(size: int) -> Placement:
    """A target over so many devices that need not be here: says how arrays would lie, and holds none."""
    mesh: Any = AbstractMesh((size, 1), AXES, axis_types=(AxisType.Auto,) * 2)
    return Placement(mesh)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def per_shard(fn: Callable, placement: Placement | None, in_specs: tuple, out_specs: Any) -> Callable:
    """fn, run on each device's part: the one place where kernels meet the mesh. Plain fn on a single device."""
    if placement is None or placement.alone:
        return fn
    # check_vma=False: Pallas calls carry no replication types.
    return jax.shard_map(fn, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def device_name() -> str:
    """What this process computes on, in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu, {cores} cores"

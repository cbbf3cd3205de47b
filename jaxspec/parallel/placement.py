"""The placement of a model on devices: the device mesh, and the mesh axes over which the model is sharded."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.common.errors import UserError

# AXES are the two mesh axes of tensor parallelism. The target is sharded over both, a draft with fewer shards over the
# first.
F = TypeVar("F", bound=Callable[..., Any])
AXES = ("tp_draft", "tp_rest")
SHARDED = frozenset({"vocab", "heads", "mlp", "features"})  # logical axes of parameters that are sharded


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of one model's arrays on devices.

    mesh: mesh of all devices that run a program.
    axes: mesh axes over which the arrays are sharded. The arrays are replicated over the other mesh axes.
    """

    mesh: Mesh
    axes: tuple[str, ...] = AXES

    @property
    def degree(self) -> int:
        """Number of shards of each sharded array."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def alone(self) -> bool:
        """Return whether the mesh has a single device."""
        return self.mesh.size == 1

    @property
    def first_device(self) -> Any:
        """First device of the mesh that belongs to this process."""
        return self.mesh.local_devices[0]

    @property
    def draft(self) -> Placement:
        """Placement of a draft on the same mesh as this target: sharded over the first mesh axis only."""
        return dataclasses.replace(self, axes=AXES[:1])

    @property
    def sum_over(self) -> tuple[str, ...]:
        """Mesh axes over which partial sums must be added up; none for a single shard."""
        return self.axes if self.degree > 1 else ()

    def sharding(self, spec: P = P()) -> NamedSharding:
        """Return the sharding with this partition spec. By default the array is replicated on every device."""
        return NamedSharding(self.mesh, spec)

    def spec(self, axes: Sequence[str | None]) -> P:
        """Return the partition spec of an array, which is sharded over its axes whose logical name is in SHARDED.

        axes: logical name of each axis of the array, or None for an axis without a name.
        """
        return P(*(self.axes if axis in SHARDED else None for axis in axes))

    def divides(self, vocab_size: int) -> bool:
        """Return whether a vocabulary of this size is sharded, which requires that the number of shards divides it."""
        return vocab_size % self.degree == 0

    def of_parameter(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Return the sharding of a parameter. axes: logical name of each axis, as in `spec`. shape: its size.

        A vocabulary axis whose size the number of shards does not divide is replicated. The sizes of other sharded axes
        must be divisible.
        """
        sharded: list[str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            replicated = axis == "vocab" and not self.divides(size)
            sharded.append(None if replicated else axis)
        return self.sharding(self.spec(sharded))

    @property
    def of_heads(self) -> P:
        """Partition spec of the outputs of the attention heads, [B, T, H * D]."""
        return P(None, None, self.axes)

    @property
    def of_pages(self) -> P:
        """Partition spec of the KV cache's pages, [P, S, 2G, D]."""
        return P(None, None, self.axes, None)

    @property
    def of_features(self) -> P:
        """Partition spec of the pages that hold the target's features for a draft, [P, S, M]."""
        return P(None, None, self.axes)


def make_placement(
    tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None, *, draft_size: int | None = None
) -> Placement:
    """Return the placement of a target on tensor_parallel_size devices: the first ones of each process, equally many.

    devices: devices to choose from; by default all.
    draft_size: number of shards of the draft (`Placement.draft`); by default that of the target.

    Raises: UserError if there are fewer devices, if the processes cannot have equally many of them, or if draft_size
      does not divide tensor_parallel_size.
    """
    devices = list(jax.devices() if devices is None else devices)
    size = tensor_parallel_size
    if not 1 <= size <= len(devices):
        raise UserError(f"tensor_parallel_size={size} needs that many devices, {len(devices)} found: lower it")
    draft_size = size if draft_size is None else draft_size
    check_draft_size(draft_size, size)
    # The shards of each copy of a draft are on neighbouring devices, so that they are in one process if possible.
    grid = np.array(shared(devices, size)).reshape(size // draft_size, draft_size).T
    return Placement(Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2))


def check_draft_size(draft_size: int, size: int) -> None:
    """Raise UserError unless a draft can have this number of shards beside a target with `size` shards."""
    if draft_size < 1 or size % draft_size:
        able = ", ".join(map(str, divisors(size)))
        raise UserError(
            f"draft_tensor_parallel_size={draft_size} does not divide tensor_parallel_size={size}: use one of {able}"
        )


def shared(devices: Sequence[Any], size: int) -> list[Any]:
    """Return `size` of these devices, equally many of each process. Raise UserError if that is impossible."""
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    count = len(by_process)
    each = size // count
    most = min(map(len, by_process.values()))
    if size % count or each > most:
        able = ", ".join(str(n * count) for n in range(1, most + 1))
        raise UserError(
            f"tensor_parallel_size={size} cannot be shared evenly by {count} processes with {most} devices: use one "
            f"of {able}"
        )
    return [device for own in by_process.values() for device in own[:each]]


def absent(size: int) -> Placement:
    """Return the placement of a target on `size` absent devices. It describes shardings, but cannot hold arrays."""
    mesh: Any = AbstractMesh((size, 1), AXES, axis_types=(AxisType.Auto,) * 2)
    return Placement(mesh)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def per_shard(fn: F, placement: Placement | None, in_specs: tuple[Any, ...], out_specs: Any) -> F:
    """Wrap fn so that each device runs it on its shards. On a single device return fn itself.

    This is the only place where kernels are combined with the mesh.

    in_specs, out_specs: partition specs of the arguments and of the result.
    """
    if placement is None or placement.alone:
        return fn
    # check_vma=False, because Pallas calls have no replication types.
    return jax.shard_map(fn, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def device_name() -> str:
    """Return the kind of JAX's first device, or for a CPU the number of cores that this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return str(device.device_kind)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu, {cores} cores"

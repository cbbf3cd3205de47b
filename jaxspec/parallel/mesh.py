"""The device mesh, and how arrays are laid out on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.errors import UserError

# Tensor parallelism is factorised: the target is sharded over both axes, a draft of smaller degree over the first.
MODEL_AXES = ("tp_draft", "tp_rest")

# Logical axis -> mesh axes.
LOGICAL_AXES: dict[str, tuple[str, ...]] = dict.fromkeys(("vocab", "heads", "mlp", "features"), MODEL_AXES)
PAGES_SPEC = P(None, None, MODEL_AXES, None)  # [P, S, 2G, D]
FEATURES_SPEC = P(None, None, MODEL_AXES)  # [P, S, M]


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh (tp_draft=tensor_parallel_size, tp_rest=1) over the first devices.

    Raises: UserError when there are fewer devices than asked for.
    """
    devices = list(jax.devices() if devices is None else devices)
    if not 1 <= tensor_parallel_size <= len(devices):
        raise UserError(
            f"tensor_parallel_size={tensor_parallel_size} needs that many devices, {len(devices)} found: lower it"
        )
    grid = np.array(devices[:tensor_parallel_size]).reshape(tensor_parallel_size, 1)
    return Mesh(grid, MODEL_AXES, axis_types=(AxisType.Auto,) * 2)


def absent_mesh(tensor_parallel_size: int) -> Any:
    """The same of devices that need not be here: says how arrays would lie, and holds none."""
    return AbstractMesh((tensor_parallel_size, 1), MODEL_AXES, axis_types=(AxisType.Auto,) * 2)


def sharding(mesh: Mesh, spec: P = P()) -> NamedSharding:
    return NamedSharding(mesh, spec)


def cut(axes: Sequence[str | None]) -> P:
    """How an array with these logical axes is cut; None is not."""
    return P(*(LOGICAL_AXES[axis] if axis else None for axis in axes))


def param_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Where a parameter lies. A vocabulary that does not divide evenly is replicated; heads must divide."""
    whole = lambda axis, size: axis == "vocab" and size % mesh.size
    return sharding(mesh, cut([None if whole(*dim) else dim[0] for dim in zip(axes, shape, strict=True)]))


def per_shard(fn: Callable, mesh: Mesh | None, in_specs: tuple, out_specs: Any) -> Callable:
    """fn, run on each device's shard: the one place where kernels meet the mesh. Plain fn on a single device."""
    if mesh is None or mesh.size == 1:
        return fn
    # check_vma=False: Pallas calls carry no replication types.
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def check_divides(config_heads: Mapping[str, int], tensor_parallel_size: int) -> None:
    """Raises UserError naming the axis that tensor_parallel_size does not divide."""
    for name, size in config_heads.items():
        if size % tensor_parallel_size:
            raise UserError(f"tensor_parallel_size={tensor_parallel_size} does not divide {name}={size}")


def device_name() -> str:
    """What this process computes on, in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu, {cores} cores"

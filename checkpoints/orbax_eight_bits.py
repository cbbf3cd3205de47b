"""Matrices in 8 bits in orbax folders: NAME holds the values, output-first [O, I], and NAME.scale the scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxspec.common.errors import UserError
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import LARGEST, AnyWeight, Weight, shardings
from pallas_kernels.weights.scaled import Scaled

SCALE = ".scale"  # suffix that turns the name of a matrix in 8 bits into the name of its scales


def flat(params: Mapping[str, AnyWeight]) -> dict[str, jax.Array]:
    """Return the arrays of parameters, by the names that they have in a checkpoint folder."""
    arrays: dict[str, jax.Array] = {}
    for name, x in params.items():
        if isinstance(x, Weight):
            assert isinstance(x, Scaled)
            natural = x.natural()
            arrays |= {name: natural.values, name + SCALE: natural.scale}
        else:
            arrays[name] = x
    return arrays


def form(name: str, parameter: Parameter, stored: Mapping[str, Any]) -> Quantization:
    """Return the form of a matrix in 8 bits. stored: metadata of the stored arrays, by name."""
    blocks = zip(parameter.shape, reversed(stored[name + SCALE].shape), strict=True)
    return Quantization(stored[name].dtype.name, *(None if n == 1 else size // n for size, n in blocks))


def declared(path: Path, name: str, parameter: Parameter, stored: Mapping[str, Any]) -> Any:
    """Return the abstract arrays of a parameter, with dtypes and shardings, as a `Scaled` weight if it is in 8 bits.

    stored: metadata of the stored arrays, by name.
    Raises: UserError for 8-bit values without scales, or with scales of a wrong shape.
    """
    here = SingleDeviceSharding(jax.devices()[0])
    if name + SCALE not in stored:
        if name in stored and stored[name].dtype.name in LARGEST:
            raise UserError(f"{path}: array {name} has 8-bit values, but no {name}{SCALE}: convert the model again")
        return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=parameter.sharding or here)
    shape, scale = parameter.shape[::-1], tuple(stored[name + SCALE].shape)
    fits = len(scale) == len(shape) and all(n and size % n == 0 for size, n in zip(shape, scale, strict=True))
    if not fits or name not in stored or stored[name].dtype.name not in LARGEST:
        raise UserError(f"{path}: array {name}{SCALE} of shape {scale} does not fit {name}: convert the model again")
    values = jax.ShapeDtypeStruct(shape, stored[name].dtype)
    weight: Any = Scaled(values, jax.ShapeDtypeStruct(scale, "float32"), parameter.dtype.name)  # type: ignore[arg-type]
    placed = shardings(weight, parameter.sharding or here)
    for axis, (size, n) in enumerate(zip(shape, scale, strict=True)):
        shards = size // placed.values.shard_shape(shape)[axis]
        if n > 1 and n % shards:
            raise UserError(
                f"{path}: {name} has blocks of {size // n}, which do not divide the {size // shards} values a device: "
                "take another tensor_parallel_size, or convert the model with --quantization int8"
            )
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), weight, placed)


def checked(path: Path, name: str, scale: jax.Array) -> jax.Array:
    """Return scales. Raises: UserError if they are not positive and finite."""
    if not bool(jnp.all((scale > 0) & jnp.isfinite(scale))):
        raise UserError(f"{path}: array {name} holds scales that are not positive and finite: convert the model again")
    return scale

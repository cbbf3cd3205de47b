"""Quantised matrices in orbax folders, output-first: NAME holds the values, and NAME.scale the scales.

Matrices of 8 bits have the values [O, I]. Those of 4 bits have the bytes u8[O, I / 2] of `grouped.Grouped`, and perhaps
zero points, i8[O, N], in NAME.zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from checkpoints import forms
from jaxspec.common.errors import UserError
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import LARGEST, AnyWeight, Weight, shardings
from pallas_kernels.weights.grouped import CHUNK, Grouped, abstract
from pallas_kernels.weights.scaled import Scaled

SCALE, ZEROS = ".scale", ".zeros"  # suffixes that turn the name of a matrix into the names of its scales and zeros
BYTES = "uint8"  # dtype of the bytes that hold integers of 4 bits


def flat(params: Mapping[str, AnyWeight]) -> dict[str, jax.Array]:
    """Return the arrays of parameters, by the names that they have in a checkpoint folder."""
    arrays: dict[str, jax.Array] = {}
    for name, x in params.items():
        if isinstance(x, Grouped):
            assert len(x.values) == len(x.scale) == 1
            assert x.order is None
            arrays |= {name: x.values[0], name + SCALE: x.scale[0]}
            if x.zeros is not None:
                arrays[name + ZEROS] = x.zeros
        elif isinstance(x, Weight):
            assert isinstance(x, Scaled)
            natural = x.natural()
            arrays |= {name: natural.values, name + SCALE: natural.scale}
        else:
            arrays[name] = x
    return arrays


def form(name: str, parameter: Parameter, stored: Mapping[str, Any]) -> Quantization:
    """Return the form of a quantised matrix. stored: metadata of the stored arrays, by name."""
    if stored[name].dtype.name == BYTES:
        groups, scales = stored[name + SCALE].shape[1], stored[name + SCALE].dtype.name
        inputs = None if groups == 1 else parameter.shape[0] // groups
        return Quantization("int4", inputs, 1, zeros=name + ZEROS in stored, scales=scales)
    blocks = zip(parameter.shape, reversed(stored[name + SCALE].shape), strict=True)
    inputs, outputs = (None if n == 1 else size // n for size, n in blocks)
    return Quantization(stored[name].dtype.name, inputs, outputs)


def declared(path: Path, name: str, parameter: Parameter, stored: Mapping[str, Any]) -> Any:
    """Return the abstract arrays of a parameter, with dtypes and shardings, as a `Scaled` weight if it is in 8 bits.

    stored: metadata of the stored arrays, by name.
    Raises: UserError for 8-bit values without scales, or with scales of a wrong shape.
    """
    here = SingleDeviceSharding(jax.devices()[0])
    if name + SCALE not in stored:
        if name in stored and stored[name].dtype.name in (*LARGEST, BYTES):
            raise UserError(f"{path}: array {name} has quantised values, but no {name}{SCALE}: convert the model again")
        return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=parameter.sharding or here)
    shape, scale = parameter.shape[::-1], tuple(stored[name + SCALE].shape)
    fits = len(scale) == len(shape) and all(n and size % n == 0 for size, n in zip(shape, scale, strict=True))
    if not fits or name not in stored or stored[name].dtype.name not in (*LARGEST, BYTES):
        raise UserError(f"{path}: array {name}{SCALE} of shape {scale} does not fit {name}: convert the model again")
    if stored[name].dtype.name == BYTES:
        return in_groups(path, name, parameter, stored, here)
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
    return with_shardings(weight, placed)


def in_groups(path: Path, name: str, parameter: Parameter, stored: Mapping[str, Any], here: Any) -> Any:
    """Return the abstract arrays of a matrix of 4 bits. Raises: UserError for shapes or shards that do not fit."""
    known = forms.layout(form(name, parameter, stored))
    shape: Any = parameter.shape
    size = known.scale[0][1] if known else 0
    if not known or shape[0] % CHUNK or size % CHUNK or stored[name + SCALE].shape[0] != shape[1]:
        raise UserError(f"{path}: array {name}{SCALE} does not fit {name} in 4 bits: convert the model again")
    if parameter.shard_shape[0] % (size or CHUNK):
        raise UserError(
            f"{path}: {name} has groups of {size or CHUNK}, which do not divide {parameter.shard_shape[0]} inputs a "
            "device: take another tensor_parallel_size, or convert the model with smaller groups, such as int4_32"
        )
    weight: Any = abstract(known, shape, parameter.dtype.name)
    return with_shardings(weight, shardings(weight, parameter.sharding or here))


def with_shardings(weight: Any, placed: Any) -> Any:
    """Return an abstract weight with shardings. placed: the sharding of each of its arrays."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), weight, placed)


def weight(path: Path, name: str, declared: Any, arrays: dict[str, jax.Array]) -> AnyWeight:
    """Return a parameter from its arrays, which are removed from `arrays`.

    declared: result of the function `declared`.
    Raises: UserError as `checked` does.
    """
    x = arrays.pop(name)
    if name + SCALE not in arrays:
        return x
    scale = checked(path, name + SCALE, arrays.pop(name + SCALE), negative=not isinstance(declared, Scaled))
    if isinstance(declared, Scaled):
        return Scaled(x, scale, declared.computes_in)
    found: Grouped = dataclasses.replace(declared, values=(x,), scale=(scale,), zeros=arrays.pop(name + ZEROS, None))
    return found


def checked(path: Path, name: str, scale: jax.Array, *, negative: bool = False) -> jax.Array:
    """Return scales. Raises: UserError if one is 0, not finite, or negative unless these are allowed."""
    if not usable(scale, negative):
        known = "0 or not finite" if negative else "not positive and finite"
        raise UserError(f"{path}: array {name} holds scales that are {known}: convert the model again")
    return scale


@functools.partial(jax.jit, static_argnums=1)
def usable(scale: jax.Array, negative: bool) -> jax.Array:
    """Return whether no scale is 0, not finite, or negative unless these are allowed."""
    return jnp.all((scale != 0 if negative else scale > 0) & jnp.isfinite(scale))

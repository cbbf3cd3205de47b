"""Quantisation of weights while they are loaded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from checkpoints.assemble import Keep, unchanged
from jaxspec.common.errors import UserError
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import FORMS, Quantization
from pallas_kernels.weights import AnyWeight, nbytes, specs
from pallas_kernels.weights.scaled import Scaled, abstract, quantise


def quantiser(name: str | None) -> Keep:
    """Return a function of a parameter's name, declaration and values that returns the parameter quantised.

    Only the matrices of products are quantised. The output head keeps its dtype, because its errors reach the logits
    directly. The embedding table, norms and biases keep their dtype, too.

    name: name of a form in `jaxspec.options.quantization.FORMS`; None to quantise nothing.
    """
    if name is None:
        return unchanged
    form = FORMS[name]

    def keep(where: str, parameter: Parameter, x: jax.Array) -> AnyWeight:
        if not is_quantised(parameter):
            return x
        check_blocks(name, form, where, parameter)
        shape: Any = parameter.shape
        weight = program(form.dtype, form.block(shape), form.activations, sharding_of(form, parameter))(x)
        jax.block_until_ready(weight)
        return weight

    return keep


def quantised(name: str | None, known: Mapping[str, Parameter], params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters quantised as `quantiser` does. The dict `params` is emptied to save memory.

    known: declarations of the parameters, by name.
    """
    keep = quantiser(name)
    return {where: keep(where, known[where], params.pop(where)) for where in list(params)}


def bytes_per_device(name: str | None, where: str, parameter: Parameter) -> int:
    """Return the bytes of a parameter in a quantised form, in the memory of each device.

    name: name of the form, as in `quantiser`; where: name of the parameter.
    Raises: UserError as `check_blocks` does.
    """
    shard = shard_shape(parameter)
    if name is None or not is_quantised(parameter):
        bytes_of_shard: int = math.prod(shard) * parameter.dtype.itemsize
        return bytes_of_shard
    form = FORMS[name]
    check_blocks(name, form, where, parameter)
    return nbytes(abstract(shard, form.dtype, form.block(shard), parameter.dtype.name))


def is_quantised(parameter: Parameter) -> bool:
    """Return whether a parameter is quantised if the option `quantization` names a form."""
    return parameter.kind == "matrix" and not parameter.head


def shard_shape(parameter: Parameter) -> Any:
    """Return the shape of the part of a parameter that each device holds."""
    return parameter.shape if parameter.sharding is None else parameter.sharding.shard_shape(parameter.shape)


def check_blocks(name: str, form: Quantization, where: str, parameter: Parameter) -> None:
    """Raise UserError unless each shard of a matrix consists of whole blocks. A block is the elements of one scale.

    name: name of the form, as in the option `quantization`; where: name of the parameter.
    """
    sizes = form.inputs, form.outputs
    axes = zip(("inputs", "outputs"), sizes, parameter.shape, shard_shape(parameter), strict=True)
    for axis, size, of_all, of_shard in axes:
        if size and of_shard % size:
            part = "" if of_all == of_shard else f" a device of its {of_all}"
            raise UserError(
                f"quantization={name!r}: blocks of {size} do not divide the {of_shard} {axis}{part} of {where}: "
                "take int8 or fp8, whose scales belong to whole columns"
            )


def sharding_of(form: Quantization, parameter: Parameter) -> Any:
    """Return the shardings of the arrays of a quantised parameter, as a pytree; None for the default device."""
    if not isinstance(parameter.sharding, NamedSharding):
        return parameter.sharding
    shape: Any = parameter.shape
    whole = abstract(shape, form.dtype, form.block(shape), parameter.dtype.name, form.activations)
    return shardings(whole, parameter.sharding)


def shardings(weight: Scaled, sharding: NamedSharding) -> Any:
    """Return the sharding of each array of a weight whose matrix [I, O] has this sharding."""
    tree = specs(weight, sharding.spec)
    place = functools.partial(NamedSharding, sharding.mesh)
    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


@functools.lru_cache(maxsize=64)
def program(
    dtype: str, block: tuple[int, int], activations: str | None, sharding: Any
) -> Callable[[jax.Array], Scaled]:
    """Return a compiled function that quantises a matrix.

    block: numbers of inputs and outputs that share a scale.
    activations: see `Quantization`.
    """
    options = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(functools.partial(quantise, dtype=dtype, block=block, activations=activations), **options)

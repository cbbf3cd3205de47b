"""Quantisation of weights while they are loaded."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

import checkpoints
from checkpoints import head_folders
from checkpoints.assemble import Keep, unchanged
from checkpoints.forms import abstract, quantise
from checkpoints.published import Published
from jaxspec.common.errors import UserError
from jaxspec.loading.resolved import ResolvedModel
from jaxspec.models.decoder import parameters
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import BLOCKS, FORMS, WITH_HEAD, Quantization, form_named, form_of_head
from pallas_kernels.weights import AnyWeight, Weight, nbytes, shardings
from pallas_kernels.weights.scaled import Scaled

logger = logging.getLogger(__name__)

HEAD = "head"  # name of the parameter that is the output head's matrix
StoredForms = Callable[[Mapping[str, Parameter]], Mapping[str, Quantization]]


def keeper(model: ResolvedModel, name: str | None) -> Keep:
    """Return the `keep` function with which the weights of a checkpoint are loaded.

    The weights of a checkpoint in 8 bits stay as they are. The log says so if the checkpoint asks for more than that.

    name: name of a form in `jaxspec.options.quantization.FORMS`; None for the form of the checkpoint.
    Raises: UserError as `check_same_form` does, other errors as `checkpoints.stored_quantization` does.
    """
    if keeps_blocks(model, name):
        return unchanged
    stored = checkpoints.stored_quantization(model.source)
    check_same_form(model.name, stored, name)
    check_has_head(model.name, model.config, name)
    if stored is None:
        return quantiser(name)
    if stored.activations and not (name and form_named(name).activations):
        logger.warning(
            "%s is published in %s with 8-bit activations or caches: here these keep their dtype, which rounds less "
            "(quantization='fp8_dynamic' rounds the activations of a checkpoint in fp8, 'int8_dynamic' in int8)",
            model.name,
            stored.name,
        )
    return of_stored(name) if name else unchanged


def keeps_blocks(model: ResolvedModel, name: str | None) -> bool:
    """Return whether the option `quantization` keeps the blocks of a model's GGUF file.

    Raises: UserError if it does, and the model is not a GGUF file.
    """
    if name == BLOCKS and model.source.kind != "gguf":
        raise UserError(
            f"quantization={name!r} keeps the blocks of a GGUF file, {model.name} is of format {model.source.kind!r}: "
            "leave it out, or take int4 or int8"
        )
    return name == BLOCKS


def of_stored(name: str) -> Keep:
    """Return the `keep` function for a checkpoint in 8 or 4 bits, whose matrices have the form `name` already.

    Activations are rounded if the form rounds them. The output head is quantised if the name asks for it.
    """
    activations = form_named(name).activations

    def keep(where: str, parameter: Parameter, x: AnyWeight) -> AnyWeight:
        if not isinstance(x, Weight):
            return quantise_head(where, parameter, x) if parameter.head else x
        return dataclasses.replace(x, activations=activations) if activations and isinstance(x, Scaled) else x

    quantise_head = quantiser(name)
    return keep


def form_of(name: str, where: str, parameter: Parameter) -> Quantization | None:
    """Return the form that the option `quantization` gives a parameter; None for a parameter that keeps its dtype.

    name: value of the option. where: name of the parameter.
    """
    if where == HEAD:
        return form_of_head(name)
    return form_named(name) if parameter.is_quantised else None


def check_has_head(model: str, config: Any, name: str | None) -> None:
    """Raise UserError if an output head is to be quantised, and the model's head is its embedding table."""
    if name and form_of_head(name) and HEAD not in parameters(config):
        raise UserError(
            f"quantization={name!r}: {model} has no output head of its own that could be quantised: take "
            f"{name.removesuffix(WITH_HEAD)!r}"
        )


def check_same_form(model: str, stored: Published | None, name: str | None) -> None:
    """Raise UserError if the option `quantization` names another form than that of the checkpoint.

    A form that rounds activations is allowed if all weights of the checkpoint have its own form of weights.

    stored: the forms of the checkpoint, None if it is not in 8 bits.
    name: value of the option.
    """
    if stored is None or name is None:
        return
    form = form_named(name)
    of_weights = dataclasses.replace(form, activations=None)
    known = {dataclasses.replace(each, scales=form.scales) for each in stored.known}
    if known != {of_weights} if form.activations else of_weights not in known:
        bits = 4 if any(each.dtype == "int4" for each in stored.known) else 8
        raise UserError(
            f"quantization={name!r}: {model} is already in {bits} bits ({stored.name}), which stay as they are: leave "
            "quantization out, or take the unquantised model"
        )


def stored_forms(
    model: ResolvedModel, known: Mapping[str, Parameter], *, blocks: bool = False
) -> dict[str, Quantization]:
    """Return the form in memory of each parameter that stays quantised as in the checkpoint of a model or head.

    known: declarations of the parameters, by name.
    blocks: whether the blocks of a GGUF file stay.
    Raises as `checkpoints.stored_forms` does.
    """
    if model.reading is not None:
        return head_folders.stored_forms(model.source.path, model.reading, known)
    return checkpoints.stored_forms(model.source, model.config, known, blocks=blocks)


def forms_of_checkpoint(model: ResolvedModel, name: str | None) -> StoredForms | None:
    """Return the function `stored_forms` for a model's checkpoint, None for a checkpoint that is not in 8 bits.

    name: value of the option `quantization`. Raises as `check_same_form` does.
    """
    if keeps_blocks(model, name):
        return functools.partial(stored_forms, model, blocks=True)
    stored = checkpoints.stored_quantization(model.source)
    check_same_form(model.name, stored, name)
    return functools.partial(stored_forms, model) if stored else None


def quantiser(name: str | None) -> Keep:
    """Return a function of a parameter's name, declaration and values that returns the parameter quantised.

    Only the matrices of products are quantised. The output head keeps its dtype unless the name asks for it, because
    its errors reach the logits directly. The embedding table, norms and biases keep their dtype, too.

    name: value of the option `quantization`; None to quantise nothing.
    """
    if name is None:
        return unchanged
    form_named(name)  # raises UserError for BLOCKS

    def keep(where: str, parameter: Parameter, x: AnyWeight) -> AnyWeight:
        form = form_of(name, where, parameter)
        if form is None or isinstance(x, Weight):
            return x
        check_blocks(name, form, where, parameter)
        weight = program(form, sharding_of(form, parameter))(x)
        jax.block_until_ready(weight)
        return weight

    return keep


def quantised(name: str | None, known: Mapping[str, Parameter], params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters quantised as `quantiser` does. The dict `params` is emptied to save memory.

    known: declarations of the parameters, by name.
    """
    keep = quantiser(name)
    return {where: keep(where, known[where], params.pop(where)) for where in list(params)}


def bytes_per_device(
    name: str | None, where: str, parameter: Parameter, stored: Mapping[str, Quantization] | None = None
) -> int:
    """Return the bytes of a parameter in a quantised form, in the memory of each device.

    name: name of the form, as in `quantiser`; where: name of the parameter.
    stored: result of `stored_forms`; None or empty for a checkpoint that is not in 8 bits.
    Raises: UserError as `check_blocks` does.
    """
    shard: Any = parameter.shard_shape
    form = stored.get(where) if stored else None
    if form is None and name is not None and (where == HEAD or not stored):
        form = form_of(name, where, parameter)
        if form is not None:
            check_blocks(name, form, where, parameter)
    if form is None:
        bytes_of_shard: int = math.prod(shard) * parameter.dtype.itemsize
        return bytes_of_shard
    return nbytes(abstract(form, shard, parameter.dtype.name))


def check_blocks(name: str, form: Quantization, where: str, parameter: Parameter) -> None:
    """Raise UserError unless each shard of a matrix consists of whole blocks. A block is the elements of one scale.

    name: name of the form, as in the option `quantization`; where: name of the parameter.
    """
    sizes = form.inputs, form.outputs
    axes = zip(("inputs", "outputs"), sizes, parameter.shape, parameter.shard_shape, strict=True)
    for axis, size, of_all, of_shard in axes:
        if size and of_shard % size:
            part = "" if of_all == of_shard else f" a device of its {of_all}"
            raise UserError(
                f"quantization={name!r}: blocks of {size} do not divide the {of_shard} {axis}{part} of {where}: "
                f"take {remedy(form, of_shard)}"
            )


def remedy(form: Quantization, inputs: int) -> str:
    """Return text that names a form like `form` whose blocks divide this number of inputs."""
    smaller = (name for name, other in FORMS.items() if dataclasses.replace(other, inputs=form.inputs) == form)
    for name in smaller:
        size = FORMS[name].inputs
        if form.dtype == "int4" and size and inputs % size == 0:
            return f"{name}, in groups of {size}"
    return "int8 or fp8, whose scales belong to whole columns"


def sharding_of(form: Quantization, parameter: Parameter) -> Any:
    """Return the shardings of the arrays of a quantised parameter, as a pytree; None for the default device."""
    if parameter.sharding is None:
        return None
    return shardings(abstract(form, parameter.shape, parameter.dtype.name), parameter.sharding)


@functools.lru_cache(maxsize=64)
def program(form: Quantization, sharding: Any) -> Callable[[jax.Array], Weight]:
    """Return a compiled function that quantises a matrix."""
    options = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(functools.partial(quantise, form=form), **options)

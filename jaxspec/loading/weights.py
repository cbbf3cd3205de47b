"""Weights of a model, loaded and checked: their dtype, and where they lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
from jaxspec.common.errors import UserError
from jaxspec.hardware.platforms import facts
from jaxspec.loading.resolved import ResolvedModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.sharding import check_divides, for_degree
from jaxspec.parallel.placement import Placement
from pallas_kernels.device import Device
from pallas_kernels.weights import dense


def compute_dtype(name: str, device: Device) -> Any:
    """ "auto" is the platform's own, and float32 on a GPU that has no bfloat16: float16, which it has, ends at 65,504,
    and the activations of some models do not (Gemma's, Qwen's)."""
    auto = "float32" if device.lacks_bfloat16 else facts(device.platform).dtype
    return jnp.dtype(auto if name == "auto" else name)


def load(model: ResolvedModel, dtype: Any, placement: Any, target: Model | None = None) -> Model:
    """Load a model, or a draft that is one. target: the draft's, in whose table it may read ids.

    Raises: UserError where the two do not fit, else as `checkpoints.load_params` does.
    """
    check_divides(model.config, placement.degree, of_draft=target is not None)
    config = for_degree(model.config, placement.degree)
    abstract, theirs = abstract_params(config, dtype, placement), {}
    if borrowed := [name for name, p in abstract.items() if p.borrowed]:
        if target is None:
            raise UserError(
                f"{model.name} is a draft, which reads ids in its target's table: give its target as the model, and "
                "this as the draft"
            )
        check_table(target.config, model.name, config)
        own = None if target.dtype == dtype else dtype  # one that lies in bfloat16 on a CPU may stay so
        as_mine = lambda name: jax.device_put(jnp.asarray(target.params[name], own), abstract[name].sharding)
        theirs = {name: as_mine(name) for name in borrowed}  # no copy where they agree
        abstract = {name: p for name, p in abstract.items() if name not in theirs}
    params = checkpoints.load_params(model.source, config, abstract)
    if target is None:
        check_finite(model.name, {name: params[name] for name, p in abstract.items() if p.head})
    return Model(config, params | theirs)


def check_finite(name: str, weights: dict[str, jax.Array]) -> None:
    """Raises UserError where a logit would be no number: whoever is told the largest only would not see it."""
    for where, known in jax.device_get(finite(weights)).items():
        if not known:
            raise UserError(
                f"{name}: {where}, of which all logits are made, holds numbers that are not finite: fetch the model "
                "again, or take another dtype"
            )


@jax.jit
def finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.isfinite(x).all() for name, x in arrays.items()}


def check_table(target: ModelConfig, name: str, draft: ModelConfig) -> None:
    """Raises UserError where the draft `name` reads ids in a table that is not the target's."""
    wanted, found = (draft.vocab_size, draft.embed_width), (target.vocab_size, target.width)
    if draft.embed_width and wanted != found:
        raise UserError(
            f"the draft {name!r} reads a table of {wanted[0]} ids and width {wanted[1]}, the target's has {found[0]} "
            f"and {found[1]}: give it the target that it was trained for, or train one for this target"
        )


def laid(model: Model, placement: Placement) -> Model:
    """The model as it lies there: no copy where it does already."""
    if placement.alone:  # its matrices may be turned for the CPU, too
        return model
    known = abstract_params(model.config, model.dtype, placement)
    moved = lambda x, p: jax.device_put(jnp.asarray(dense(x), p.dtype), p.sharding)
    return Model(model.config, {name: moved(x, known[name]) for name, x in model.params.items()})

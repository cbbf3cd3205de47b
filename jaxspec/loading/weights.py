"""Loading the weights of a model with their dtype and sharding, and checking them."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
from jaxspec.common.errors import UserError
from jaxspec.hardware.platforms import facts
from jaxspec.loading.quantised import keeper, keeps_blocks
from jaxspec.loading.resolved import ResolvedModel
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.sharding import check_divides, for_degree
from jaxspec.parallel.placement import Placement
from pallas_kernels.device import Device, here
from pallas_kernels.weights import AnyWeight, Weight, dense, nbytes, shardings
from pallas_kernels.weights.grouped import Grouped
from pallas_kernels.weights.scaled import Scaled

logger = logging.getLogger(__name__)


def compute_dtype(name: str, device: Device) -> Any:
    """Return the dtype to compute in. "auto" stands for the platform's default, or float32 on a GPU without bfloat16.

    float16 is no default, because activations of some models (Gemma's, Qwen's) exceed its largest value, 65,504.
    """
    auto = "float32" if device.lacks_bfloat16 else facts(device.platform).dtype
    return jnp.dtype(auto if name == "auto" else name)


def load(
    model: ResolvedModel, dtype: Any, placement: Any, target: Model | None = None, *, quantization: str | None = None
) -> Model:
    """Load a model, or a draft that is a complete model.

    target: the target of a draft, which may read the target's embedding table; None for a model that is no draft.
    quantization: value of the option `quantization`, the weights' form in memory; None to keep the form of the
      checkpoint.
    Raises: UserError if draft and target do not fit, other errors as `checkpoints.load_params` does.
    """
    check_divides(model.config, placement.degree, of_draft=target is not None)
    config = for_degree(model.config, placement.degree)
    abstract = abstract_params(config, dtype, placement)
    shared: dict[str, jax.Array] = {}
    if from_target := [name for name, p in abstract.items() if p.from_target]:
        if target is None:
            raise UserError(
                f"{model.name} is a draft, which reads ids in its target's table: give its target as the model, and "
                "this as the draft"
            )
        check_table(target.config, model.name, config)
        other = None if target.dtype == dtype else dtype  # None keeps the table's dtype, which on a CPU may be bfloat16
        for name in from_target:  # copies nothing if dtype and sharding agree
            shared[name] = jax.device_put(jnp.asarray(target.params[name], other), abstract[name].sharding)
        abstract = {name: p for name, p in abstract.items() if name not in shared}
    keep, blocks = keeper(model, quantization), keeps_blocks(model, quantization)
    params = checkpoints.load_params(model.source, config, abstract, keep=keep, blocks=blocks)
    if any(isinstance(x, Weight) for x in params.values()):
        before = sum(p.nbytes for p in abstract.values()) / 1e9
        logger.info("%s: its weights take %.3f GB, %.3f GB in %s", model.name, nbytes(params) / 1e9, before, dtype)
    if target is None:
        check_finite(model.name, {name: params[name] for name, p in abstract.items() if p.head})
    return Model(config, params | shared)


def check_finite(name: str, weights: dict[str, AnyWeight]) -> None:
    """Raise UserError if a weight of the output head holds a number that is not finite.

    Logits would then not be finite either. A user who sees only argmax tokens would not notice.

    name: name of the model. weights: parameters of the head, by name.
    """
    for where, is_finite in jax.device_get(finite(weights)).items():
        if not is_finite:
            raise UserError(
                f"{name}: {where}, of which all logits are made, holds numbers that are not finite: fetch the model "
                "again, or take another dtype"
            )


@jax.jit
def finite(weights: dict[str, AnyWeight]) -> dict[str, jax.Array]:
    """Return for each weight whether all elements of its arrays are finite."""
    return {
        name: jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(of)])) for name, of in weights.items()
    }


def check_table(target: ModelConfig, name: str, draft: ModelConfig) -> None:
    """Raise UserError if the draft `name` reads its target's embedding table but expects another size of it."""
    wanted, found = (draft.vocab_size, draft.embed_width), (target.vocab_size, target.width)
    if draft.embed_width and wanted != found:
        raise UserError(
            f"the draft {name!r} reads a table of {wanted[0]} ids and width {wanted[1]}, the target's has {found[0]} "
            f"and {found[1]}: give it the target that it was trained for, or train one for this target"
        )


def resharded(model: Model, placement: Placement, kernels: str | None = None) -> Model:
    """Return the model with the shardings of a placement. Arrays that have these shardings already are not copied.

    kernels: value of the option `kernels`, on which the form of weights in memory depends.
    """
    if placement.alone:  # on one device nothing is sharded, and a CPU's streamed forms stay
        return model
    known = abstract_params(model.config, model.dtype, placement)
    params: dict[str, Any] = {}
    for name, x in model.params.items():
        sharding = known[name].sharding
        if isinstance(x, Scaled | Grouped):
            if jax.tree.map(lambda array: array.sharding, x) == shardings(x, sharding):
                params[name] = x
                continue
            weight = x.natural()
            params[name] = jax.device_put(weight, shardings(weight, sharding))
        else:
            params[name] = jax.device_put(jnp.asarray(dense(x), known[name].dtype), sharding)
    return Model(model.config, params).stored_for(Backend(here(), placement, kernels))

"""One step of distillation: gradients of the draft's masters, over all devices, in parts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.hardware.platforms import facts
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.model import Model
from jaxspec.parallel.placement import AXES
from jaxspec.train.loss import TOLD, loss_sums
from jaxspec.train.options import TrainOptions, loss_weights
from pallas_kernels.device import Device

Params = dict[str, jax.Array]


class State(NamedTuple):
    """What a checkpoint holds: float32 masters and the optimiser's state, which counts the steps."""

    params: Params
    optimizer: Any


def make_optimizer(options: TrainOptions, config: ModelConfig) -> optax.GradientTransformation:
    """Muon for the products between table and head and Adam for the rest, for a learning rate of 1: a step multiplies
    its updates by the rate it is given. Muon's updates are as large as Adam's usually are
    (https://arxiv.org/abs/2502.16982): one rate serves."""
    # Muon (https://kellerjordan.github.io/posts/muon/) makes the singular values of an update alike: a loss of 0.77
    # where AdamW for all had 0.83, 1,450 steps on the way to a draft model of three layers.
    known = parameters(config).items()
    products = {name for name, p in known if p.kind == "matrix" and "vocab" not in p.axes}
    rule = lambda name: optax.contrib.MuonDimensionNumbers() if name in products else None
    muon = optax.contrib.muon(
        1.0,
        adam_b2=0.98,
        weight_decay=options.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: {name: rule(name) for name in params},
    )
    return optax.chain(optax.clip_by_global_norm(options.clip), muon)


def learning_rate(options: TrainOptions, step: int, steps: int) -> float:
    """Of the step after `step` of `steps`: a linear warm-up, then a cosine down to a hundredth. In plain Python: the
    device would answer only when the step that is under way is done."""
    warmup = min(options.warmup, steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    done = (step + 1 - warmup) / max(steps - warmup, 1)
    return options.learning_rate * (0.505 + 0.495 * math.cos(math.pi * done))


def make_step(
    target: ModelConfig, draft: ModelConfig, options: TrainOptions, backend: Backend, dtype: Any
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """step(state, rate, fixed, batch of `loss_sums`) -> (state, metrics), the state donated.

    target: of `own_ids_first`; it and its params are not looked at where the batch has what the target says. fixed: the
    draft's parameters that are not trained, and the target's; dtype: of the computation. metrics: means over the tokens
    that count, of "loss", "tv", "agree" and "lost" (see `loss_sums`), and "gradient", its norm before it is cut.
    """
    optimizer, configs, weights = make_optimizer(options, draft), (target, draft), loss_weights(options.loss)

    def sums(params, fixed, batch):
        frozen, target_params = fixed
        k = options.num_speculative_tokens
        return loss_sums(configs, weights, backend, dtype, {**params, **frozen}, target_params, batch, k)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, rate, fixed: tuple[Params, Params], batch):
        def part(total, batch):
            (loss, told), grads = jax.value_and_grad(sums, has_aux=True)(state.params, fixed, batch)
            return jax.tree.map(jnp.add, total, ({"loss": loss, **told}, grads)), None

        # Rows go to the parts in turns, so that every device keeps a share of each part.
        split = lambda x: x.reshape(-1, options.accumulate, *x.shape[1:]).swapaxes(0, 1)
        told = dict.fromkeys(("loss", *TOLD, "count"), jnp.float32(0))
        zero = (told, jax.tree.map(jnp.zeros_like, state.params))
        (told, grads), _ = lax.scan(part, zero, jax.tree.map(split, batch))
        count = jnp.maximum(told.pop("count"), 1)
        told, grads = jax.tree.map(lambda x: x / count, (told, grads))
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        updates = jax.tree.map(lambda x: rate * x, updates)
        metrics = told | {"gradient": optax.tree.norm(grads)}
        return State(optax.apply_updates(state.params, updates), moments), metrics

    return step


def dense_backend(config: ModelConfig, device: Device, dtype: Any) -> Backend:
    """Of passes over whole rows: with cuDNN's attention, which never writes the scores to memory, where this device and
    its libraries have it."""
    backend = Backend(device, None, "reference")
    attention = facts(device.platform).dense_attention
    if attention == backend.dense_attention or jnp.dtype(dtype).itemsize != 2:
        return backend
    heads = lambda count: jax.ShapeDtypeStruct((1, 128, count, config.head_dim), dtype)
    query, key = heads(config.num_heads), heads(config.num_kv_heads)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=attention)
    try:
        jax.jit(jax.grad(lambda *args: jnp.sum(attend(*args)).astype(jnp.float32))).lower(query, key, key).compile()
    except Exception:  # what JAX raises for a missing library or an old device differs from version to version
        return backend
    return dataclasses.replace(backend, dense_attention=attention)


def first_state(draft: Model, options: TrainOptions, placed: Any) -> State:
    """A state of its own arrays, those that are trained, placed alike: steps donate them."""
    own = {name: jnp.copy(draft.params[name]) for name, p in parameters(draft.config).items() if p.trained}
    return jax.device_put(State(own, make_optimizer(options, draft.config).init(own)), placed)


def place_rows(placement: Any) -> Callable[[Any], Any]:
    """Puts a batch's rows on the devices, each a share of them."""
    spread = placement.sharding(P(AXES))
    return lambda batch: jax.device_put(batch, spread)

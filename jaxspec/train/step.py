"""One step of distillation: the gradients over all devices, accumulated in parts, and the optimiser's update."""

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

from jaxspec.common.shapes import Array, Float
from jaxspec.hardware.platforms import facts
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, parameters
from jaxspec.models.model import Model
from jaxspec.parallel.placement import AXES
from jaxspec.train.loss import METRICS, Sums, loss_sums
from jaxspec.train.passes import Batch
from jaxspec.train.train_options import TrainOptions, loss_weights
from pallas_kernels.device import Device

DraftParams = dict[str, jax.Array]
FixedParams = tuple[DraftParams, Params]  # the draft's parameters that are not trained, and the target's parameters


class State(NamedTuple):
    """The contents of a checkpoint: float32 master parameters, and the optimiser's state, which counts the steps."""

    params: DraftParams
    optimizer: Any


def make_optimizer(options: TrainOptions, config: ModelConfig) -> optax.GradientTransformation:
    """Return Muon for the matrices between embedding and head, and Adam for all other parameters.

    The gradients' norm is first clipped to the option clip. The optimiser's learning rate is 1; a training step
    multiplies the updates by the step's own rate. One rate serves both rules, because Muon's updates are scaled to the
    usual size of Adam's (https://arxiv.org/abs/2502.16982).
    """
    # Muon (https://kellerjordan.github.io/posts/muon/) equalises the singular values of an update. After 90 s of
    # training, a draft model's loss was 0.77, against 0.83 with AdamW for all parameters (docs/notes/drafts.md).
    known = parameters(config).items()
    products = {name for name, p in known if p.kind == "matrix" and "vocab" not in p.axes}

    def dimension_numbers(params: DraftParams) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
        """Return Muon's dimension numbers for its matrices, and None for the parameters that Adam updates."""
        return {name: optax.contrib.MuonDimensionNumbers() if name in products else None for name in params}

    muon = optax.contrib.muon(
        1.0,
        adam_b2=0.98,
        weight_decay=options.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dimension_numbers,
    )
    return optax.chain(optax.clip_by_global_norm(options.clip), muon)


def learning_rate(options: TrainOptions, step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a hundredth of the highest rate.

    step, steps: index of the step, from 0, and number of all steps.

    This is plain Python, because a value computed on the device would arrive only after the running step.
    """
    warmup = min(options.warmup, steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    done = (step + 1 - warmup) / max(steps - warmup, 1)
    return options.learning_rate * (0.505 + 0.495 * math.cos(math.pi * done))


def make_step(
    target: ModelConfig, draft: ModelConfig, options: TrainOptions, backend: Backend, dtype: Any
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """Return the compiled function step(state, rate, fixed, batch), which returns the new state and metrics.

    Args:
      target: the target's configuration, from `own_ids_first` if the batches have no ids.
      draft: the draft's configuration.
      options: the number of drafts, the losses' weights, and the settings of the optimiser.
      backend: the device, and the implementation of each of the models' operations.
      dtype: dtype of the computation.

    The step donates the state. fixed holds the draft's parameters that are not trained, and the target's parameters.
    batch is that of `loss_sums`. The metrics are "loss", "tv", "agree" and "lost", which are the sums of `loss_sums`
    divided by its "count"; and "gradient", the norm of the gradients, divided likewise, before clipping.
    """
    optimizer = make_optimizer(options, draft)
    weights = loss_weights(options.loss)

    def sums(params: DraftParams, fixed: FixedParams, batch: Batch) -> Sums:
        frozen, target_params = fixed
        k = options.num_speculative_tokens
        return loss_sums((target, draft), weights, backend, dtype, {**params, **frozen}, target_params, batch, k)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: State, rate: Float[Array, ""], fixed: FixedParams, batch: Batch
    ) -> tuple[State, dict[str, Float[Array, ""]]]:
        def part(total: Any, batch: Batch) -> tuple[Any, None]:
            (loss, metrics), grads = jax.value_and_grad(sums, has_aux=True)(state.params, fixed, batch)
            return jax.tree.map(jnp.add, total, ({"loss": loss, **metrics}, grads)), None

        def split(x: jax.Array) -> jax.Array:
            """Return x in parts [accumulate, B / accumulate, ...]. Each part has rows from every device."""
            return x.reshape(-1, options.accumulate, *x.shape[1:]).swapaxes(0, 1)

        zero_metrics = dict.fromkeys(("loss", *METRICS, "count"), jnp.float32(0))
        zero = (zero_metrics, jax.tree.map(jnp.zeros_like, state.params))
        (metrics, grads), _ = lax.scan(part, zero, jax.tree.map(split, batch))
        count = jnp.maximum(metrics.pop("count"), 1)
        metrics, grads = jax.tree.map(lambda x: x / count, (metrics, grads))
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        updates = jax.tree.map(lambda x: rate * x, updates)
        metrics = metrics | {"gradient": optax.tree.norm(grads)}
        return State(optax.apply_updates(state.params, updates), moments), metrics

    return step


def dense_backend(config: ModelConfig, device: Device, dtype: Any) -> Backend:
    """Return the backend (device, and implementation of each operation) of passes over whole rows, without caches.

    It has cuDNN's attention if the dtype has 16 bits, and the device and its libraries support that. cuDNN's attention
    never writes the scores to memory.
    """
    backend = Backend(device, None, "reference")
    attention = facts(device.platform).dense_attention
    if attention == backend.dense_attention or jnp.dtype(dtype).itemsize != 2:
        return backend
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=attention)
    try:
        for heads, kv_heads, size in {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in config.layers}:
            query = jax.ShapeDtypeStruct((1, 128, heads, size), dtype)
            key = jax.ShapeDtypeStruct((1, 128, kv_heads, size), dtype)
            jax.jit(jax.grad(lambda *args: jnp.sum(attend(*args)).astype(jnp.float32))).lower(query, key, key).compile()
    except Exception:  # JAX's exception for a missing library or an old device differs between versions
        return backend
    return dataclasses.replace(backend, dense_attention=attention)


def first_state(draft: Model, options: TrainOptions, placed: Any) -> State:
    """Return the initial state of the training. placed: the sharding of its arrays.

    Its parameters are copies of the draft's trained ones, because training steps donate them.
    """
    own = {name: jnp.copy(draft.params[name]) for name, p in parameters(draft.config).items() if p.trained}
    state = State(own, make_optimizer(options, draft.config).init(own))
    placed_state: State = jax.device_put(state, placed)
    return placed_state


def place_rows(placement: Any) -> Callable[[Any], Any]:
    """Return a function that puts a batch on the devices, with its rows sharded over them."""
    spread = placement.sharding(P(AXES))
    return lambda batch: jax.device_put(batch, spread)

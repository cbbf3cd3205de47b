"""From hidden states to logits, over all of the target's ids or over a reduced vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.common.shapes import Array, Float
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.parameters import declare
from jaxspec.parallel.placement import per_shard
from pallas_kernels import plain, weights
from pallas_kernels.likeliest_token import likeliest_token
from pallas_kernels.weights.output_first import OutputFirst, Streamed


class Vocabulary(NamedTuple):
    """The ids that a draft can propose, where these are only the frequent ones of the target's V. It reads all.

    d2t i32[_]: draft to target: the target's id of each of the draft's.
    t2d i32[V]: target to draft: the draft's id of each of the target's; where it lacks one, the number of its ids.
    """

    d2t: jax.Array
    t2d: jax.Array


def fit_vocabulary(
    logits: Float[Array, "*rows _"], vocab_size: int, vocabulary: Vocabulary | None = None
) -> Float[Array, "*rows {vocab_size}"]:
    """Over the target's ids, -inf for those that a reduced vocabulary lacks. A draft padded differently never proposes
    ids that the target lacks."""
    if vocabulary is not None:
        logits = jnp.take(logits, vocabulary.t2d, axis=-1, mode="fill", fill_value=-jnp.inf)
    missing = vocab_size - logits.shape[-1]
    widths = ((0, 0),) * (logits.ndim - 1) + ((0, max(missing, 0)),)
    return jnp.pad(logits, widths, constant_values=-jnp.inf)[..., :vocab_size]


class Head(nnx.Module):
    """Hidden states -> logits, of whatever declares its parameters with `declare_head`. A tied one has `embed`."""

    config: Any  # ModelConfig or one of its kind
    embed: Any

    def declare_head(self, config: ModelConfig, dtype: Any) -> None:
        """A reduced vocabulary's ids, and the head where it is not the embedding table."""
        c, matrix = config, declare("matrix", dtype)
        self.declare_ids(c)
        if not c.tied:
            self.head = matrix(c.width, c.head_size - c.rare_vocab_size, axes=(None, "vocab"), head=True)
        if c.rare_vocab_size:
            self.rare_in = matrix(c.width, c.rare_width, head=True)
            self.rare_head = matrix(c.rare_width, c.rare_vocab_size, axes=(None, "vocab"), head=True)

    def declare_ids(self, config: ModelConfig) -> None:
        if config.reduced_vocab_size:
            ids = declare("ids")
            self.d2t, self.t2d = ids(config.head_size), ids(config.vocab_size)

    @property
    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary(self.d2t[...], self.t2d[...]) if self.config.reduced_vocab_size else None

    def parts(self, x, backend: Backend) -> list[jax.Array]:
        """The logits f32[..., _] of each product that makes some, one after the other, as their weights are cut."""
        c = self.config
        parts = [product(x, as_weight(self.embed[...], backend) if c.tied else self.head[...], backend)]
        if c.rare_vocab_size:
            few = product(x, self.rare_in[...], backend).astype(x.dtype)
            parts.append(product(few, self.rare_head[...], backend))
        cap = c.logit_soft_cap
        return [cap * jnp.tanh(part / cap) for part in parts] if cap else parts

    def logits(self, x, backend: Backend):
        """Hidden states x [..., E] -> logits f32[..., V], replicated; of a reduced vocabulary over its own ids."""
        parts = [whole(logits, backend) for logits in self.parts(x, backend)]
        return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def likeliest(self, x, backend: Backend, vocab_size: int | None = None):
        """x [..., E] -> the id i32[...] of the largest logit, of the first vocab_size; of a reduced vocabulary, what
        that id is in the target's."""
        c = self.config
        # On CPU the table is streamed.
        if c.tied and not c.logit_soft_cap and backend.degree == 1 and not backend.streams:
            find = lambda x, table: likeliest_token(x, table, num_ids=vocab_size, **backend.how())
            return per_shard(find, backend.placement, (P(), P()), P())(x, self.embed[...])
        if backend.degree == 1:
            found = plain.likeliest(self.logits(x, backend)[..., :vocab_size])
        else:
            found = of_largest(self.parts(x, backend), backend, vocab_size)
        return jnp.take(self.d2t[...], found, mode="clip") if c.reduced_vocab_size else found


def of_largest(parts: Sequence[jax.Array], backend: Backend, count: int | None) -> Any:
    """The place i32[...] of the largest of the first `count` logits, of which each device has those that it computed:
    they tell one another their largest, not the logits."""
    start, value = 0, None
    place: Any = None
    for logits in parts:
        size, rows = logits.shape[-1], logits.shape[:-1]
        left = None if count is None else count - start
        found, at = (x.reshape(rows) for x in largest(logits.reshape(-1, size), backend, left))
        place = at if value is None else jnp.where(found > value, at + start, place)
        value = found if value is None else jnp.maximum(found, value)
        start += size
    return place


def largest(table: Float[Array, "_ V"], backend: Backend, count: int | None) -> tuple[jax.Array, jax.Array]:
    """(f32[_], i32[_]): the largest of the first `count` of each row, and its place."""
    size = table.shape[-1]

    def own(table: jax.Array, start: Any = 0) -> tuple[jax.Array, jax.Array]:
        if count is not None and count < size:
            table = jnp.where(start + jnp.arange(table.shape[-1]) < count, table, -jnp.inf)
        at = plain.likeliest(table)
        return jnp.take_along_axis(table, at[:, None], axis=-1)[:, 0], at + start

    if (placement := backend.in_parts(size)) is None:
        return own(table)
    axes, bits = placement.axes, lambda x, dtype: lax.bitcast_convert_type(x, dtype)

    def of_all(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, at = own(table, lax.axis_index(axes) * table.shape[-1])
        both = lax.all_gather(jnp.stack([bits(value, jnp.int32), at]), axes)  # as one, which costs half of two
        value, at = bits(both[:, 0], jnp.float32).T, both[:, 1].T
        first = plain.likeliest(value)[:, None]
        return tuple(jnp.take_along_axis(x, first, axis=-1)[:, 0] for x in (value, at))  # type: ignore[return-value]

    return per_shard(of_all, placement, (P(None, axes),), (P(), P()))(table)


def product(x: jax.Array, weight: weights.AnyWeight, backend: Backend) -> jax.Array:
    """Multiply x [..., I] with a weight [I, O] -> f32[..., O]."""
    return weights.product(x, weight, dtype=jnp.float32, device=backend.device)


def as_weight(table: jax.Array, backend: Backend) -> weights.Weight:
    """Return the weight [E, V] of which a table [V, E] holds the columns."""
    return Streamed(table) if backend.streams else OutputFirst(table)


def whole(logits: jax.Array, backend: Backend) -> jax.Array:
    """Logits [..., V], whole on every device.

    Over several they are first asked for in the parts that these compute, or else the compiler gathers the weights
    instead; and as a table, since the TPU compiler pads a third axis to many times its size.
    """
    placement = backend.placement
    if placement is None or backend.degree == 1:
        return logits
    table = logits.reshape(-1, logits.shape[-1])
    parts = placement.of_parameter((None, "vocab"), table.shape)
    for placed in (parts, placement.sharding()):
        table = lax.with_sharding_constraint(table, placed)
    return table.reshape(logits.shape)

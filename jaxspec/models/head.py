"""The output head, which computes logits from hidden states, for all of the target's ids or a reduced vocabulary."""

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
from pallas_kernels.argmax_token import argmax_token
from pallas_kernels.head_product import head_product
from pallas_kernels.weights.output_first import OutputFirst, Streamed


class Vocabulary(NamedTuple):
    """A reduced vocabulary: the ids that a draft can propose, a frequent subset of the target's V ids.

    The draft's inputs may be any of the target's ids.

    d2t i32[_]: draft to target: the target's id for each id of the draft.
    t2d i32[V]: target to draft: the draft's id for each id of the target. For an id that the draft lacks, the value is
      the draft's number of ids.
    """

    d2t: jax.Array
    t2d: jax.Array


def fit_vocabulary(
    logits: Float[Array, "*rows _"], vocab_size: int, vocabulary: Vocabulary | None = None
) -> Float[Array, "*rows {vocab_size}"]:
    """Return a draft's logits over the target's vocab_size ids, with -inf for ids that the draft lacks.

    A draft's vocabulary may be padded to more ids than the target's. The logits of these further ids are dropped.
    """
    if vocabulary is not None:
        logits = jnp.take(logits, vocabulary.t2d, axis=-1, mode="fill", fill_value=-jnp.inf)
    missing = vocab_size - logits.shape[-1]
    widths = ((0, 0),) * (logits.ndim - 1) + ((0, max(missing, 0)),)
    return jnp.pad(logits, widths, constant_values=-jnp.inf)[..., :vocab_size]


class Head(nnx.Module):
    """Base class of modules with an output head, whose parameters `declare_head` declares.

    embed: the embedding table, which is also the head's matrix in a model with tied embeddings.
    """

    config: Any  # the model's ModelConfig, or an object of a derived class
    embed: Any

    def declare_head(self, config: ModelConfig, dtype: Any) -> None:
        """Declare the ids of a reduced vocabulary, and the head's matrices other than the embedding table."""
        c = config
        matrix = declare("matrix", dtype)
        self.declare_ids(c)
        if not c.tied:
            self.head = matrix(c.width, c.head_size - c.rare_vocab_size, axes=(None, "vocab"), head=True)
        if c.rare_vocab_size:
            self.rare_in = matrix(c.width, c.rare_width, head=True)
            self.rare_head = matrix(c.rare_width, c.rare_vocab_size, axes=(None, "vocab"), head=True)

    def declare_ids(self, config: ModelConfig) -> None:
        """Declare the ids of a reduced vocabulary, if the model has one."""
        if config.reduced_vocab_size:
            ids = declare("ids")
            self.d2t = ids(config.head_size)
            self.t2d = ids(config.vocab_size)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The reduced vocabulary of a draft; None if the model has all ids of the target."""
        return Vocabulary(self.d2t[...], self.t2d[...]) if self.config.reduced_vocab_size else None

    def parts(self, x: jax.Array, backend: Backend) -> list[jax.Array]:
        """Return the logits f32[..., _] from each of the head's matrix products, in the order of their ids.

        The logits are sharded like the weights. `logits` gathers them, `of_largest` compares them without gathering.
        """
        c = self.config
        weight = as_weight(self.embed[...], backend) if c.tied else self.head[...]
        parts = [product(x, weight, backend)]
        if c.rare_vocab_size:
            reduced = product(x, self.rare_in[...], backend).astype(x.dtype)
            parts.append(product(reduced, self.rare_head[...], backend))
        if c.logit_scale != 1.0:
            parts = [c.logit_scale * part for part in parts]
        cap = c.logit_soft_cap
        return [cap * jnp.tanh(part / cap) for part in parts] if cap else parts

    def logits(self, x: jax.Array, backend: Backend) -> jax.Array:
        """Return the logits f32[..., V] of hidden states x [..., E], replicated on all devices.

        If the model's vocabulary is reduced, the logits are of the model's own ids.
        """
        parts = [whole(logits, backend) for logits in self.parts(x, backend)]
        return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def argmax_token(self, x: jax.Array, backend: Backend, vocab_size: int | None = None) -> jax.Array:
        """Return the argmax token i32[...] of hidden states x [..., E], among the first vocab_size ids.

        The token is an id of the target, even if the model's own vocabulary is reduced.
        """
        c = self.config
        # On CPU the matrix product in `parts` reads the table faster than the op `argmax_token`.
        if c.tied and not c.logit_soft_cap and backend.degree == 1 and not backend.streams:

            def find(x: jax.Array, table: jax.Array) -> jax.Array:
                return argmax_token(x, table, num_ids=vocab_size, **backend.how())

            result: jax.Array = per_shard(find, backend.placement, (P(), P()), P())(x, self.embed[...])
            return result
        if backend.degree == 1:
            found = plain.argmax(self.logits(x, backend)[..., :vocab_size])
        else:
            found = of_largest(self.parts(x, backend), backend, vocab_size)
        return jnp.take(self.d2t[...], found, mode="clip") if c.reduced_vocab_size else found


def of_largest(parts: Sequence[jax.Array], backend: Backend, count: int | None) -> Any:
    """Return the index i32[...] of the largest of each row's first `count` logits; a `count` of None means all.

    Each device sends only its largest logit of a row and its index to the other devices, once for each array.

    parts: arrays of logits, as `Head.parts` returns them, sharded over devices.
    """
    start, value = 0, None
    index: Any = None
    for logits in parts:
        size = logits.shape[-1]
        rows = logits.shape[:-1]
        left = None if count is None else count - start
        found, at = (x.reshape(rows) for x in largest(logits.reshape(-1, size), backend, left))
        if value is None:
            index, value = at, found
        else:
            index = jnp.where(found > value, at + start, index)
            value = jnp.maximum(found, value)
        start += size
    return index


def largest(table: Float[Array, "_ V"], backend: Backend, count: int | None) -> tuple[jax.Array, jax.Array]:
    """Return (f32[_], i32[_]): the largest of the first `count` logits of each row of `table`, and its index."""
    size = table.shape[-1]

    def own(table: jax.Array, start: Any = 0) -> tuple[jax.Array, jax.Array]:
        if count is not None and count < size:
            table = jnp.where(start + jnp.arange(table.shape[-1]) < count, table, -jnp.inf)
        at = plain.argmax(table)
        return jnp.take_along_axis(table, at[:, None], axis=-1)[:, 0], at + start

    placement = backend.vocab_placement(size)
    if placement is None:
        return own(table)
    axes = placement.axes

    def of_all(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, at = own(table, lax.axis_index(axes) * table.shape[-1])
        # Value and index are gathered as one array, which takes half as long as two.
        both = lax.all_gather(jnp.stack([lax.bitcast_convert_type(value, jnp.int32), at]), axes)
        value = lax.bitcast_convert_type(both[:, 0], jnp.float32).T
        at = both[:, 1].T
        first = plain.argmax(value)[:, None]
        return tuple(jnp.take_along_axis(x, first, axis=-1)[:, 0] for x in (value, at))  # type: ignore[return-value]

    result: tuple[jax.Array, jax.Array] = per_shard(of_all, placement, (P(None, axes),), (P(), P()))(table)
    return result


def product(x: jax.Array, weight: weights.AnyWeight, backend: Backend) -> jax.Array:
    """Multiply x [..., I] with a weight [I, O]; return f32[..., O].

    The compiler partitions the product with a weight that is sharded. It cannot partition a kernel.
    """
    how: dict[str, Any] = {"dtype": jnp.float32, "device": backend.device}
    if backend.degree > 1:
        return weights.product(x, weight, **how)

    def multiply(x: jax.Array, weight: weights.AnyWeight) -> jax.Array:
        return head_product(x, weight, **how)

    return per_shard(multiply, backend.placement, (P(), P()), P())(x, weight)


def as_weight(table: jax.Array, backend: Backend) -> weights.Weight:
    """Return an embedding table [V, E] as the weight [E, V] of a matrix product, without copying it."""
    return Streamed(table) if backend.streams else OutputFirst(table)


def whole(logits: jax.Array, backend: Backend) -> jax.Array:
    """Return the logits [..., V] replicated on every device.

    The logits are first constrained to the sharding of the weights. Otherwise the compiler would gather the weights.
    The logits are reshaped to two axes before, because the TPU compiler would pad a third axis to many times its size.
    """
    placement = backend.placement
    if placement is None or backend.degree == 1:
        return logits
    table = logits.reshape(-1, logits.shape[-1])
    sharded = placement.of_parameter((None, "vocab"), table.shape)
    table = lax.with_sharding_constraint(table, sharded)
    table = lax.with_sharding_constraint(table, placement.sharding())
    result: jax.Array = table.reshape(logits.shape)
    return result

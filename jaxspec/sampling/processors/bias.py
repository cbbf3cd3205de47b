"""Bias of logits: a request's logit_bias, and -inf for ids that are not among the request's allowed_token_ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.shapes import Array, Float
from jaxspec.sampling.arrays import filled, padded
from jaxspec.sampling.processors.base import Place, Processor, Text, put


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class FewBiased:
    """The bias of each row as short lists of ids, which are padded with -1.

    restricted bool[B]: whether only allowed_ids may be sampled.
    allowed_ids i32[B,_]: ids that may be sampled if `restricted`.
    ids i32[B,_]: ids with a logit bias.
    values f32[B,_]: bias of each id in `ids`.
    """

    restricted: jax.Array
    allowed_ids: jax.Array
    ids: jax.Array
    values: jax.Array

    def dense(self, vocab_size: int) -> Float[Array, "B V"]:
        """Return the bias as a dense array with a value for every id of the vocabulary."""
        forbidden = jnp.where(self.restricted, -jnp.inf, 0.0)[:, None]
        bias = jnp.broadcast_to(forbidden, (self.restricted.shape[0], vocab_size))
        bias = put(bias, self.allowed_ids).set(0.0, mode="drop")
        result: Float[Array, "B V"] = put(bias, self.ids).add(self.values, mode="drop")
        return result


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bias(Processor):
    """The processor that adds each row's bias to the logits. bias: a FewBiased, or a dense array f32[B,V]."""

    bias: FewBiased | jax.Array

    @classmethod
    def of_requests(cls, requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> Bias:
        params = [r.params for r in requests]
        return cls(few_biased(params, rows, room.biased) if room.biased else dense_bias(params, rows, vocab_size))

    def tables(self, text: Text, pool: jax.Array | None) -> Float[Array, "B V"]:
        """Return the bias of each row as a dense array."""
        return self.bias.dense(text.vocab_size) if isinstance(self.bias, FewBiased) else self.bias

    def apply(self, tables: Any, state: Any, logits: Float[Array, "B V"], place: Place) -> Float[Array, "B V"]:
        result: Float[Array, "B V"] = logits + tables
        return result


def few_biased(params: Sequence[Any], rows: int, width: int) -> FewBiased:
    """Return the bias of SamplingParams that list at most `width` ids each. rows: number of rows of the batch."""
    allowed_ids = [p.allowed_token_ids or () for p in params]
    ids = [[i for i, _ in p.logit_bias] for p in params]
    values = [[value for _, value in p.logit_bias] for p in params]
    return FewBiased(
        restricted=filled(rows, [p.allowed_token_ids is not None for p in params], np.bool_, False),
        allowed_ids=padded(allowed_ids, rows, width, -1),
        ids=padded(ids, rows, width, -1),
        values=padded(values, rows, width, 0.0, np.float32),
    )


def dense_bias(params: Sequence[Any], rows: int, vocab_size: int) -> Any:
    """Return the bias of SamplingParams that list any number of ids, as a dense array f32[rows, vocab_size]."""
    bias = np.zeros((rows, vocab_size), np.float32)
    for row, p in zip(bias, params, strict=False):
        if p.allowed_token_ids is not None:
            row[:] = -np.inf
            row[list(p.allowed_token_ids)] = 0.0
        for i, value in p.logit_bias:
            row[i] += value
    return bias

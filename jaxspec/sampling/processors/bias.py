"""Numbers that a row adds to logits: its logit_bias, and -inf where only some ids are allowed."""

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
    """The bias of a few ids of each row, padded with -1.

    restricted bool[B]: only allowed_ids may be chosen.
    allowed_ids i32[B,_].
    ids i32[B,_]: to whose logits something is added.
    values f32[B,_]: what.
    """

    restricted: jax.Array
    allowed_ids: jax.Array
    ids: jax.Array
    values: jax.Array

    def dense(self, vocab_size: int) -> Float[Array, "B V"]:
        forbidden = jnp.where(self.restricted, -jnp.inf, 0.0)[:, None]
        bias = jnp.broadcast_to(forbidden, (self.restricted.shape[0], vocab_size))
        bias = put(bias, self.allowed_ids).set(0.0, mode="drop")
        return put(bias, self.ids).add(self.values, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bias(Processor):
    """The bias of each row: of a few ids, or dense f32[B,V]."""

    bias: FewBiased | jax.Array

    @classmethod
    def of_requests(cls, requests, rows, room, vocab_size):
        params = [r.params for r in requests]
        return cls(few_biased(params, rows, room.biased) if room.biased else dense_bias(params, rows, vocab_size))

    def tables(self, text: Text) -> Float[Array, "B V"]:
        """Return the bias in its dense form."""
        return self.bias.dense(text.vocab_size) if isinstance(self.bias, FewBiased) else self.bias

    def apply(self, tables, state, logits, place: Place):
        return logits + tables


def few_biased(params: Sequence[Any], rows: int, width: int) -> FewBiased:
    """Return the bias of SamplingParams that list few ids."""
    listed = lambda lists, fill=-1.0, dtype=np.int32: padded(lists, rows, width, fill, dtype)
    return FewBiased(
        restricted=filled(rows, [p.allowed_token_ids is not None for p in params], np.bool_, False),
        allowed_ids=listed([p.allowed_token_ids or () for p in params]),
        ids=listed([[i for i, _ in p.logit_bias] for p in params]),
        values=listed([[value for _, value in p.logit_bias] for p in params], 0.0, np.float32),
    )


def dense_bias(params: Sequence[Any], rows: int, vocab_size: int) -> Any:
    """Return the bias of SamplingParams that list any number of ids, f32[rows, vocab_size]."""
    bias = np.zeros((rows, vocab_size), np.float32)
    for row, p in zip(bias, params, strict=False):
        if p.allowed_token_ids is not None:
            row[:] = -np.inf
            row[list(p.allowed_token_ids)] = 0.0
        for i, value in p.logit_bias:
            row[i] += value
    return bias

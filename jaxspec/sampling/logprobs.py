"""Log-probabilities and ranks of tokens under the target's raw logits, and the most probable ids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Logprobs:
    """The log-probability of each token, and those of the n most probable ids at the token's position.

    chosen f32[B,T]: log-probability of the token.
    rank i32[B,T]: rank of the token among all ids; the most probable id has rank 1.
    top_ids i32[B,T,n]: most probable ids, in descending order of probability.
    top f32[B,T,n]: log-probabilities of top_ids.
    """

    chosen: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


def empty(num_rows: int, length: int, n: int) -> Logprobs:
    """Return a Logprobs filled with zeros, for `length` tokens per row and n most probable ids per token."""
    token = (num_rows, length)
    return Logprobs(
        chosen=jnp.zeros(token, jnp.float32),
        rank=jnp.zeros(token, jnp.int32),
        top_ids=jnp.zeros((*token, n), jnp.int32),
        top=jnp.zeros((*token, n), jnp.float32),
    )


def logprobs(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], n: int) -> Logprobs:
    """Compute the Logprobs of these tokens, with the n most probable ids at each position.

    A token's rank is 1 plus the number of ids whose logit is larger than the token's.
    """
    total = jax.nn.logsumexp(logits, axis=-1)
    value = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    rank = 1 + jnp.sum(logits > value, axis=-1, dtype=jnp.int32)
    top, top_ids = lax.top_k(logits, n)
    return Logprobs(value[..., 0] - total, rank, top_ids.astype(jnp.int32), top - total[..., None])


def record(kept: Logprobs, at: Int[Array, "B T"], new: Logprobs) -> Logprobs:
    """Return `kept` with the entries of `new` written at indices `at` of its second axis.

    Entries whose index is beyond that axis are dropped.
    """
    rows = jnp.arange(at.shape[0])[:, None]
    result: Logprobs = jax.tree.map(lambda old, x: old.at[rows, at].set(x, mode="drop"), kept, new)
    return result

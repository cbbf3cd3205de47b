"""Log-probabilities of tokens under raw logits, their ranks, and the likeliest ids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Logprobs:
    """Of each token, and of the n likeliest ids at its place.

    chosen f32[B,T]: the token's own log-probability.
    rank i32[B,T]: 1 for the likeliest.
    top_ids i32[B,T,n]: the likeliest first.
    top f32[B,T,n]: their log-probabilities.
    """

    chosen: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


def empty(num_rows: int, length: int, n: int) -> Logprobs:
    """Room for `length` tokens a row."""
    floats, ints = (lambda *shape, t=t: jnp.zeros((num_rows, length, *shape), t) for t in (jnp.float32, jnp.int32))
    return Logprobs(floats(), ints(), ints(n), floats(n))


def logprobs(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], n: int) -> Logprobs:
    """Of these tokens, and of the n likeliest ids at each place. Ids as likely as the token do not lower its rank."""
    total = jax.nn.logsumexp(logits, axis=-1)
    value = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    rank = 1 + jnp.sum(logits > value, axis=-1, dtype=jnp.int32)
    top, top_ids = lax.top_k(logits, n)
    return Logprobs(value[..., 0] - total, rank, top_ids.astype(jnp.int32), top - total[..., None])


def record(kept: Logprobs, at: Int[Array, "B T"], new: Logprobs) -> Logprobs:
    """new written into kept at these places of its second axis; places beyond it are dropped."""
    rows = jnp.arange(at.shape[0])[:, None]
    return jax.tree.map(lambda old, x: old.at[rows, at].set(x, mode="drop"), kept, new)

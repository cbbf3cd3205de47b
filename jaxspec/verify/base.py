"""The input and the output of an acceptance rule."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Float, Int, UInt
from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng


class Case(NamedTuple):
    """The input of an acceptance rule: a round's draft tokens, and the target's output at their T = K + 1 places.

    Place 0 comes after the committed text, place i after the first i draft tokens. K is the number of draft tokens.

    logits: the target's logits, changed by processors, temperature and filters. If no rule in the program reads logits,
      this is the array `own` instead.
    own: the target's own token at each place: the argmax of its processed logits. In a row whose rule shares noise with
      the draft, the noise is added to the logits first.
    proposal: the draft tokens [B,K], and the distribution q that each was drawn from.
    seed, num_tokens: keys of the round's random numbers: the row's result of `rng.of_seed`, and the row's number of
      committed tokens at the start of the round.
    options: values of the rule's own options, one after the other in the order of `Rule.options`.
    """

    logits: Float[Array, "B T V"] | Int[Array, "B T"]
    own: Int[Array, "B T"]
    proposal: Proposal
    seed: UInt[Array, "B 2"]
    num_tokens: Int[Array, " B"]
    options: Float[Array, " _"]

    @property
    def num_drafts(self) -> int:
        return self.proposal.tokens.shape[1]

    def uniforms(self) -> Float[Array, "B K"]:
        """Draw a uniform random number in [0, 1) for each draft token."""
        shape = self.proposal.tokens.shape
        if not self.num_drafts:
            return jnp.zeros(shape)
        start = jnp.broadcast_to(self.num_tokens[:, None], shape)
        which = jnp.arange(self.num_drafts, dtype=jnp.int32)
        return rng.uniform(rng.keys(self.seed, start, "accept", jnp.broadcast_to(which, shape)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Verdict:
    """The decision of an acceptance rule on the draft tokens of each row.

    num_accepted i32[B]: number of accepted draft tokens, from 0 to the row's number of draft tokens.
    next_token i32[B]: the extra token, which follows the accepted draft tokens.
    last i32[B]: place of the last accepted node of a tree of drafts; None for a chain.
    """

    num_accepted: jax.Array
    next_token: jax.Array
    last: jax.Array | None = None


def leading(accepted: Bool[Array, "B K"], num_proposed: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the number of accepted draft tokens before the first rejected one.

    accepted: whether each draft token passes the rule's test.
    num_proposed: number of real draft tokens of each row. Later ones are padding and count as rejected.
    """
    real = jnp.arange(accepted.shape[1])[None, :] < num_proposed[:, None]
    return jnp.sum(jnp.cumprod((accepted & real).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

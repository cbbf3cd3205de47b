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
    """A round's proposal and the target's output at the T = K + 1 places: the input of a rule.

    logits: the target's processed logits; equal to `own` if no rule of the launch reads logits.
    own: the target's own tokens, the argmax of its processed logits. A row whose rule shares noise adds it first.
    proposal: the drafts [B,K] and their q.
    seed, num_tokens: the keys of the round's random numbers: the row's `rng.of_seed`, and its number of tokens at the
      start of the round.
    options: values of the rule's own options.
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
        """Draw a uniform random number in [0, 1) for each draft."""
        shape = self.proposal.tokens.shape
        if not self.num_drafts:
            return jnp.zeros(shape)
        start = jnp.broadcast_to(self.num_tokens[:, None], shape)
        which = jnp.arange(self.num_drafts, dtype=jnp.int32)
        return rng.uniform(rng.keys(self.seed, start, "accept", jnp.broadcast_to(which, shape)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Verdict:
    """A rule's decision on a proposal.

    num_accepted i32[B]: number of accepted drafts, 0..K_b.
    next_token i32[B]: the extra token that follows them.
    last i32[B]: place of the last accepted node of a tree; None for a chain.
    """

    num_accepted: jax.Array
    next_token: jax.Array
    last: jax.Array | None = None


def leading(accepted: Bool[Array, "B K"], num_proposed: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the number of accepted drafts before the first rejected one, among the num_proposed real ones."""
    real = jnp.arange(accepted.shape[1])[None, :] < num_proposed[:, None]
    return jnp.sum(jnp.cumprod((accepted & real).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

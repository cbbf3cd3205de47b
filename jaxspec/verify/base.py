"""What an acceptance rule is given, and what it gives back."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Float, Int, UInt
from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng


class Case(NamedTuple):
    """A round's proposals, and what the target says of the T = K + 1 places.

    logits: the target's, as processed; where no rule of the launch looks at them, in their place `own`.
    own: the target's own tokens: the largest of its logits, after the noise that the row's rule shares with it.
    proposal: of tokens [B,K].
    seed (`rng.of_seed`), num_tokens: what the round's random numbers belong to; num_tokens is that at its start.
    options: the numbers of the rule's own options.
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
        """A number in [0, 1) for each draft."""
        shape = self.proposal.tokens.shape
        if not self.num_drafts:
            return jnp.zeros(shape)
        start, which = jnp.broadcast_to(self.num_tokens[:, None], shape), jnp.arange(self.num_drafts, dtype=jnp.int32)
        return rng.uniform(rng.keys(self.seed, start, "accept", jnp.broadcast_to(which, shape)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Verdict:
    """What a rule says of a proposal.

    num_accepted i32[B]: drafts kept, 0..K_b.
    next_token i32[B]: the one extra token that follows them.
    last i32[B]: of a tree, the place of the last one that is kept; None: a chain's stand in a row.
    """

    num_accepted: jax.Array
    next_token: jax.Array
    last: jax.Array | None = None


def leading(accepted: Bool[Array, "B K"], num_proposed: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many drafts stand before the first failure, among the num_proposed real ones."""
    real = jnp.arange(accepted.shape[1])[None, :] < num_proposed[:, None]
    return jnp.sum(jnp.cumprod((accepted & real).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

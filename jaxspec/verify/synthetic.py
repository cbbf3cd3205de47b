"""Acceptance at given rates, whatever the drafts are: for benchmarks. The text that comes out means nothing."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng
from jaxspec.shapes import Array, Float, Int, UInt
from jaxspec.verify.base import Verdict, leading


def verify(
    y: Int[Array, "B T"],
    proposal: Proposal,
    rates: Float[Array, " K"],
    seed: UInt[Array, "B 2"],
    num_tokens: Int[Array, " B"],
) -> Verdict:
    """y: the target's own tokens. rates: for i = 1..K, P(at least i drafts are accepted); the draw of each is
    conditional on those before it."""
    num_drafts = proposal.tokens.shape[1]
    if not num_drafts:
        num_accepted = jnp.zeros_like(num_tokens)
    else:
        uniforms = [rng.uniform(rng.keys(seed, num_tokens, "accept", i)) for i in range(num_drafts)]
        before = jnp.concatenate([jnp.ones(1), rates[:-1]])
        accepted = jnp.stack(uniforms, axis=1) * before < rates
        num_accepted = leading(accepted, proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(y, num_accepted))

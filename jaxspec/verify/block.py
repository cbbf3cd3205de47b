"""Block verification: all drafts of a round are judged together, so that more of them are kept than one by one.

Source: Sun et al., https://arxiv.org/abs/2403.10444, algorithm 2.
w_i is how much of the path x_1..x_i there is in the target's law for each time that it is drafted, at most 1. Of the
lengths whose number falls below its chance the largest is kept: a draft that alone would fail may stay for what follows
it. Lossless, and in expectation accepts no fewer drafts than the standard rule, of which it is the case K = 1.

The random numbers belong to the round's start. Were they those of absolute positions, stopping at i would tell of the
numbers behind i, which the next round would use again: that is biased here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict
from jaxspec.verify.standard import at_tokens, extra_law, extra_token, q_of_drafts


def verify(case: Case) -> Verdict:
    p, proposal = jax.nn.softmax(case.logits, axis=-1), case.proposal
    weights, chances = judged(p, proposal)
    place = jnp.arange(1, case.num_drafts + 1, dtype=jnp.int32)
    # Strictly: u = 0 must not accept what the target never emits.
    kept = (case.uniforms() < chances) & (place <= proposal.num_proposed[:, None])
    num_accepted = jnp.max(jnp.where(kept, place, 0), axis=1, initial=0)
    extra = extra_law(p, proposal, num_accepted, rng.take_row(weights, num_accepted))
    return Verdict(num_accepted, extra_token(case, extra, num_accepted))


def judged(p: Float[Array, "B T V"], proposal: Proposal) -> tuple[Float[Array, "B T"], Float[Array, "B K"]]:
    """-> (w_0..w_K; h_1..h_K: the chance that i drafts are kept where not more are)."""
    tokens, q, num_drafts = proposal.tokens, proposal.probs, proposal.tokens.shape[1]
    p_x, q_x, w = at_tokens(p[:, :-1], tokens), q_of_drafts(proposal), [jnp.ones(len(tokens))]
    for i in range(num_drafts):
        path = w[-1] * p_x[:, i]
        w.append(jnp.where(path > 0.0, jnp.minimum(path / q_x[:, i], 1.0), 0.0))
    weights = jnp.stack(w, axis=1)
    inner = weights[:, 1:-1]  # of the places that another draft follows
    q_next = jax.nn.one_hot(tokens[:, 1:], p.shape[-1], dtype=p.dtype) if q is None else q[:, 1:]
    left = jnp.sum(jnp.maximum(inner[..., None] * p[:, 1:-1] - q_next, 0.0), axis=-1)
    whole = left + 1.0 - inner
    chances = jnp.where(whole > 0.0, left / jnp.where(whole > 0.0, whole, 1.0), 1.0)
    chances = jnp.pad(chances, ((0, 0), (0, num_drafts - inner.shape[1])))
    last = jnp.arange(1, num_drafts + 1) == proposal.num_proposed[:, None]
    return weights, jnp.where(last, weights[:, 1:], chances)


def law(
    p: Float[Array, "N T V"], q: Float[Array, "N K V"], tokens: Int[Array, "N K"]
) -> tuple[Float[Array, "N T"], Float[Array, "N T V"]]:
    """As `standard.law`."""
    count, num_drafts = tokens.shape
    proposal = Proposal(tokens, q, jnp.full(count, num_drafts))
    weights, chances = judged(p, proposal)
    ones = jnp.ones((count, 1))
    chances = jnp.concatenate([ones, chances], axis=1)
    longer_fail = jnp.cumprod((1.0 - chances)[:, ::-1], axis=1)[:, ::-1]
    lengths = chances * jnp.concatenate([longer_fail[:, 1:], ones], axis=1)
    extras = [extra_law(p, proposal, jnp.full(count, i), weights[:, i]) for i in range(num_drafts + 1)]
    return lengths, jnp.stack(extras, axis=1)

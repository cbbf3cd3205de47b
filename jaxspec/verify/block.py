"""Block verification, an acceptance rule that judges all drafts of a round together instead of one by one.

Source: Sun et al., https://arxiv.org/abs/2403.10444, algorithm 2.
The weight w_i of the first i drafts x_1..x_i is their probability under the target divided by that under the draft,
clipped to 1 after each draft. Each length i from 1 to K has a uniform random number and a chance h_i. The accepted
length is the largest i whose random number is below h_i. So a draft that would fail alone may be accepted because of
the drafts after it. The rule is lossless, and in expectation accepts no fewer drafts than the standard rule. For K = 1
both rules are the same.

The random numbers are keyed by the position where the round starts. If they were keyed by absolute positions, the next
round would reuse the numbers after the accepted length. That length depends on them, so the output would be biased.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict
from jaxspec.verify.standard import at_tokens, extra_token, q_of_drafts, residual_distribution


def verify(case: Case) -> Verdict:
    """Accept the largest number i of drafts whose uniform random number is below the chance h_i."""
    p = jax.nn.softmax(case.logits, axis=-1)
    proposal = case.proposal
    weights, chances = judged(p, proposal)
    place = jnp.arange(1, case.num_drafts + 1, dtype=jnp.int32)
    # The comparison is "<", not "<=", because a random number of 0 must not accept a token whose p is 0.
    kept = (case.uniforms() < chances) & (place <= proposal.num_proposed[:, None])
    num_accepted = jnp.max(jnp.where(kept, place, 0), axis=1, initial=0)
    extra = residual_distribution(p, proposal, num_accepted, rng.take_row(weights, num_accepted))
    return Verdict(num_accepted, extra_token(case, extra, num_accepted))


def judged(p: Float[Array, "B T V"], proposal: Proposal) -> tuple[Float[Array, "B T"], Float[Array, "B K"]]:
    """Return the weights w_0..w_K, and the chances h_1..h_K.

    w_i is the clipped ratio of the probabilities of the first i drafts under target and draft. h_i is P(i drafts are
    accepted, given that no more than i are).

    p: the target's distribution at each place.
    """
    tokens, q = proposal.tokens, proposal.probs
    num_drafts = tokens.shape[1]
    p_x = at_tokens(p[:, :-1], tokens)
    q_x = q_of_drafts(proposal)
    w = [jnp.ones(len(tokens))]
    for i in range(num_drafts):
        path = w[-1] * p_x[:, i]
        w.append(jnp.where(path > 0.0, jnp.minimum(path / q_x[:, i], 1.0), 0.0))
    weights = jnp.stack(w, axis=1)
    inner = weights[:, 1:-1]  # weights w_1..w_{K-1}, of all drafts but the last
    q_next = jax.nn.one_hot(tokens[:, 1:], p.shape[-1], dtype=p.dtype) if q is None else q[:, 1:]
    left = jnp.sum(jnp.maximum(inner[..., None] * p[:, 1:-1] - q_next, 0.0), axis=-1)
    whole = left + 1.0 - inner
    chances = jnp.where(whole > 0.0, left / jnp.where(whole > 0.0, whole, 1.0), 1.0)
    chances = jnp.pad(chances, ((0, 0), (0, num_drafts - inner.shape[1])))
    last = jnp.arange(1, num_drafts + 1) == proposal.num_proposed[:, None]
    return weights, jnp.where(last, weights[:, 1:], chances)


def output_distribution(
    p: Float[Array, "N T V"], q: Float[Array, "N K V"], tokens: Int[Array, "N K"]
) -> tuple[Float[Array, "N T"], Float[Array, "N T V"]]:
    """Compute the exact distribution of the outcome under this rule, as `standard.output_distribution` does."""
    count, num_drafts = tokens.shape
    proposal = Proposal(tokens, q, jnp.full(count, num_drafts))
    weights, chances = judged(p, proposal)
    ones = jnp.ones((count, 1))
    chances = jnp.concatenate([ones, chances], axis=1)
    longer_fail = jnp.cumprod((1.0 - chances)[:, ::-1], axis=1)[:, ::-1]
    lengths = chances * jnp.concatenate([longer_fail[:, 1:], ones], axis=1)
    extras = [residual_distribution(p, proposal, jnp.full(count, i), weights[:, i]) for i in range(num_drafts + 1)]
    return lengths, jnp.stack(extras, axis=1)

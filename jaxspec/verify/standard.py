"""The standard acceptance rule: accept draft x_i with probability min(1, p/q), and resample at the first rejection.

Source: Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318.
p is the target's distribution and q is the draft's, both after the request's processors, temperature and filters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading
from pallas_kernels.plain import argmax


def verify(case: Case) -> Verdict:
    """Accept each draft with probability min(1, p/q), up to the first rejection."""
    p = jax.nn.softmax(case.logits, axis=-1)
    proposal = case.proposal
    # The comparison is "<", not "<=", because a random number of 0 must not accept a token whose p is 0.
    accepted = case.uniforms() * q_of_drafts(proposal) < at_tokens(p[:, :-1], proposal.tokens)
    num_accepted = leading(accepted, proposal.num_proposed)
    return Verdict(num_accepted, extra_token(case, residual_distribution(p, proposal, num_accepted), num_accepted))


def at_tokens(distribution: Float[Array, "B K V"], tokens: Int[Array, "B K"]) -> Float[Array, "B K"]:
    """Return the probability of each token under the distribution at its place."""
    return jnp.take_along_axis(distribution, tokens[..., None], axis=-1)[..., 0]


def q_of_drafts(proposal: Proposal) -> Float[Array, "B K"]:
    """Return the probability with which each draft was drawn. It is 1 if the proposal has no distribution q."""
    if proposal.probs is None:
        return jnp.ones(proposal.tokens.shape)
    return at_tokens(proposal.probs, proposal.tokens)


def residual_distribution(
    p: Float[Array, "B T V"],
    proposal: Proposal,
    num_accepted: Int[Array, " B"],
    weight: Float[Array, " B"] | float = 1.0,
) -> Float[Array, "B V"]:
    """Return the distribution of the extra token, which follows the accepted drafts.

    The distribution is p after the drafts if all drafts were accepted, else normalize(max(weight * p - q, 0)) at the
    first rejection.

    p: the target's distribution at each place.
    weight: factor of p for each row; 1 for the standard rule.
    """
    p_at = rng.take_row(p, num_accepted)
    num_drafts = proposal.tokens.shape[1]
    if not num_drafts:
        return p_at
    failure = jnp.minimum(num_accepted, num_drafts - 1)
    if proposal.probs is None:
        q_at = jax.nn.one_hot(rng.take_row(proposal.tokens, failure), p.shape[-1], dtype=p.dtype)
    else:
        q_at = rng.take_row(proposal.probs, failure)
    residual = jnp.maximum(jnp.reshape(weight, (-1, 1)) * p_at - q_at, 0.0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    # The extra token comes from p if no draft was rejected, or if the residual rounds to 0: 0 / 0 would be NaN.
    bonus = (num_accepted >= proposal.num_proposed)[:, None] | (mass <= 0.0)
    return jnp.where(bonus, p_at, residual / jnp.where(mass > 0.0, mass, 1.0))


def extra_token(case: Case, probs: Float[Array, "B V"], num_accepted: Int[Array, " B"]) -> Int[Array, " B"]:
    """Draw the extra token from `probs`, with the random key for the place after the accepted drafts."""
    noise = rng.gumbel(rng.keys(case.seed, case.num_tokens, "residual", num_accepted), probs.shape[-1])
    return argmax(jnp.log(probs) + noise)


def output_distribution(
    p: Float[Array, "N T V"], q: Float[Array, "N K V"], tokens: Int[Array, "N K"]
) -> tuple[Float[Array, "N T"], Float[Array, "N T V"]]:
    """Compute the exact distribution of a round's outcome for given drafts `tokens` from q, with T = K + 1.

    Returns: P(exactly i drafts are accepted) [N,T], and the distribution of the extra token given i [N,T,V].
    """
    count, num_drafts = tokens.shape
    accept = jnp.minimum(1.0, at_tokens(p[:, :-1], tokens) / at_tokens(q, tokens))
    ones = jnp.ones((count, 1))
    reach = jnp.concatenate([ones, jnp.cumprod(accept, axis=1)], axis=1)
    lengths = reach * jnp.concatenate([1.0 - accept, ones], axis=1)
    proposal = Proposal(tokens, q, jnp.full(count, num_drafts))
    extras = [residual_distribution(p, proposal, jnp.full(count, i)) for i in range(num_drafts + 1)]
    return lengths, jnp.stack(extras, axis=1)

"""Acceptance at given rates, whatever the drafts are: for benchmarks. The text that comes out means nothing."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading


def verify(case: Case) -> Verdict:
    """options: rates, for i = 1..K, or more, P(at least i drafts are accepted); the draw of each is conditional on
    those before it."""
    num_drafts = case.proposal.tokens.shape[1]
    if not num_drafts or case.options is None:
        num_accepted = jnp.zeros_like(case.num_tokens)
    else:
        rates = case.options[:num_drafts]
        uniforms = [rng.uniform(rng.keys(case.seed, case.num_tokens, "accept", i)) for i in range(num_drafts)]
        before = jnp.concatenate([jnp.ones(1), rates[:-1]])
        accepted = jnp.stack(uniforms, axis=1) * before < rates
        num_accepted = leading(accepted, case.proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(case.own, num_accepted))

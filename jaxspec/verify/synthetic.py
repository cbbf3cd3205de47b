"""Acceptance at given rates, whatever the drafts are: for benchmarks. The text that comes out means nothing."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading


def verify(case: Case) -> Verdict:
    """options: rates, for i = 1..K, or more, P(at least i drafts are accepted); the draw of each is conditional on
    those before it."""
    rates = jnp.concatenate([jnp.ones(1), case.options[: case.num_drafts]])
    num_accepted = leading(case.uniforms() * rates[:-1] < rates[1:], case.proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(case.own, num_accepted))

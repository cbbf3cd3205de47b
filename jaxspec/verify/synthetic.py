"""Synthetic acceptance, a rule for benchmarks: drafts are accepted at given rates, so that the text is meaningless."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading


def verify(case: Case) -> Verdict:
    """Accept drafts at the rates in `case.options`, whatever the drafts are.

    The i-th rate is P(at least i drafts are accepted), for i = 1..K; further rates are ignored. If the drafts before
    draft i are accepted, draft i is accepted with probability rate i / rate i-1, where rate 0 is 1.
    """
    rates = jnp.concatenate([jnp.ones(1), case.options[: case.num_drafts]])
    num_accepted = leading(case.uniforms() * rates[:-1] < rates[1:], case.proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(case.own, num_accepted))

"""Synthetic acceptance, for benchmarks: accept drafts at given rates, whatever they are. The text is meaningless."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading


def verify(case: Case) -> Verdict:
    """Accept drafts at the rates in `case.options`: P(at least i drafts are accepted) for i = 1..K or more.

    Given that the drafts before it are accepted, a draft is accepted with the ratio of its rate and the previous one.
    """
    rates = jnp.concatenate([jnp.ones(1), case.options[: case.num_drafts]])
    num_accepted = leading(case.uniforms() * rates[:-1] < rates[1:], case.proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(case.own, num_accepted))

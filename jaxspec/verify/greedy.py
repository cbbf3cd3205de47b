"""The greedy rule: keep what equals the target's own token, go on with that token at the first that does not."""

from __future__ import annotations

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading


def verify(case: Case) -> Verdict:
    """The target's own tokens come out, whatever was drafted."""
    num_accepted = leading(case.proposal.tokens == case.own[:, :-1], case.proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(case.own, num_accepted))

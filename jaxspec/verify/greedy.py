"""The greedy acceptance rule: accept drafts while they equal the target's argmax tokens, then emit the target's own."""

from __future__ import annotations

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading


def verify(case: Case) -> Verdict:
    """Accept drafts while they equal the target's own tokens (`case.own`). The output does not depend on the drafts."""
    num_accepted = leading(case.proposal.tokens == case.own[:, :-1], case.proposal.num_proposed)
    return Verdict(num_accepted, rng.take_row(case.own, num_accepted))

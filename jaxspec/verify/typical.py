"""Typical acceptance, a rule that accepts a draft if it is likely enough under the target. The rule is not lossless.

Source: Cai et al. (Medusa), https://arxiv.org/abs/2401.10774, section 2.3.1.
A draft is accepted if its probability under the target exceeds min(posterior_threshold, posterior_alpha * exp(-H)),
where H is the entropy of the target's distribution at the draft's place. So a high entropy lowers the threshold.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.sampling import rng
from jaxspec.verify.base import Case, Verdict, leading
from jaxspec.verify.standard import at_tokens, extra_token


def verify(case: Case) -> Verdict:
    """Accept drafts before the first one that is too unlikely. case.options: posterior_threshold, posterior_alpha.

    The extra token is the target's argmax token after a rejection. If no draft was rejected, it is drawn from p.
    """
    threshold, alpha = case.options
    log_p = jax.nn.log_softmax(case.logits, axis=-1)
    p = jnp.exp(log_p)
    entropy = -jnp.sum(jnp.where(p > 0.0, p * log_p, 0.0), axis=-1)
    enough = jnp.minimum(threshold, alpha * jnp.exp(-entropy))[:, :-1]
    num_accepted = leading(at_tokens(p[:, :-1], case.proposal.tokens) > enough, case.proposal.num_proposed)
    drawn = extra_token(case, rng.take_row(p, num_accepted), num_accepted)
    failed = num_accepted < case.proposal.num_proposed
    return Verdict(num_accepted, jnp.where(failed, rng.take_row(case.own, num_accepted), drawn))

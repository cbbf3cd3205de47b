"""Synthetic acceptance keeps drafts at the given rates, whatever they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Proposal
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.verify import synthetic
from jaxspec.verify.base import Case
from tests.support.lively_models import PROMPTS, new_engine, params, serve, total
from tests.support.sizes import cases

K, ROWS = 3, 20_000
verify = jax.jit(synthetic.verify)


def accepted(rates: tuple[float, ...], num_proposed: int = K) -> np.ndarray:
    """Drafts kept in each of ROWS rows."""
    tokens, own = jnp.zeros((ROWS, K), jnp.int32), jnp.broadcast_to(jnp.arange(K + 1), (ROWS, K + 1))
    proposal = Proposal(tokens, None, jnp.full(ROWS, num_proposed))
    seeds = jnp.stack([jnp.zeros(ROWS, jnp.uint32), jnp.arange(ROWS, dtype=jnp.uint32)], axis=1)
    verdict = verify(Case(own, own, proposal, seeds, jnp.full(ROWS, 7), jnp.array(rates)))
    assert (verdict.next_token == verdict.num_accepted).all(), "the target's own token after what was kept"
    return np.asarray(verdict.num_accepted)


def rates(**how) -> tuple[float, ...]:
    how |= {"model": "x", "rejection_sample_method": "synthetic", "num_speculative_tokens": K}
    found = SpeculativeConfig(**how).synthetic_acceptance_rates
    assert found is not None
    return found


@pytest.mark.parametrize("given", [(0.9, 0.5, 0.1), (0.5, 0.5, 0.5), (1.0, 0.3, 0.0), (0.0,) * 3, (1.0,) * 3])
@pytest.mark.parametrize("num_proposed", [K, 2, 0])
def test_rates_are_those_of_reaching_a_position(given, num_proposed):
    """Not conditional on the one before; within five standard deviations, and exactly where they are 0 or 1."""
    kept = accepted(rates(synthetic_acceptance_rates=given), num_proposed)
    for i, rate in enumerate(given):
        rate *= i < num_proposed
        assert abs((kept > i).mean() - rate) <= 5 * np.sqrt(rate * (1 - rate) / ROWS)


@pytest.mark.parametrize("length", [1.0, 1.3, 2.0, 3.75, K + 1.0])
def test_lengths_are_means(length):
    tokens = accepted(rates(synthetic_acceptance_length=length)) + 1
    assert abs(tokens.mean() - length) <= 5 * 0.5 / np.sqrt(ROWS)
    assert set(tokens.tolist()) <= {int(length), int(np.ceil(length))}


@cases("length", [1.0, 3.0, K + 1.0], quick=[1.0, K + 1.0])
def test_with_a_draft_that_is_always_wrong(length):
    """Whole lengths hold in every round of a request, under any parameters."""
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    engine = new_engine("wrong", K, spec=spec)
    requests = serve(engine, PROMPTS[:3], [*params((25, 24)), SamplingParams(max_tokens=24, logprobs=1)])
    for request in requests[1:]:
        assert request.metrics.mean_acceptance_length == length
        assert len(request.output) == 24
        assert request.metrics.num_drafts == 24 / length


def test_where_nothing_but_the_likeliest_ids_is_known():
    """Rows that sample, under a rule that asks for no logits."""
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    requests = serve(new_engine("wrong", K, spec=spec), PROMPTS[:3], params((24,) * 3, temperature=1.0))
    assert [(r.finish_reason, r.error) for r in requests] == [("length", None)] * 3
    assert [r.metrics.mean_acceptance_length for r in requests] == [3.0] * 3


def test_with_prompt_lookup():
    """What it proposes is kept at the rates; where it finds nothing there is nothing to keep."""
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0, 1.0, 0.0)}
    requests = serve(new_engine("ngram", K, "loops", spec=spec), PROMPTS[2:], params((24,) * 3))
    rounds = sum(r.metrics.num_drafts for r in requests)
    kept = total(requests)
    assert 0 < kept[1] <= kept[0] <= rounds
    assert kept[2] == 0
    assert sum(r.metrics.num_draft_tokens for r in requests) >= sum(kept)

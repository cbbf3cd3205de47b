"""Typical acceptance against numpy; greedy requests stay exact under it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Proposal
from jaxspec.verify import typical
from jaxspec.verify.base import Case, Verdict
from jaxspec.verify.typical_options import DEFAULTS
from pallas_kernels.plain import argmax
from tests.support import exact
from tests.support.lively_models import PROMPTS, new_engine, params, plain, serve, texts

V, K, ROWS = 5, 3, 3000


def verify(logits: np.ndarray, drafts: np.ndarray, num_proposed: np.ndarray, options: tuple[float, float]) -> Verdict:
    rows = len(logits)
    seed = jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1)
    z, x = jnp.asarray(logits, jnp.float32), jnp.asarray(drafts, jnp.int32)
    proposal = Proposal(x, None, jnp.asarray(num_proposed, jnp.int32))
    case = Case(z, argmax(z), proposal, seed, jnp.full(rows, 7), jnp.array(options, jnp.float32))
    return jax.device_get(jax.jit(typical.verify)(case))


def reference(logits: np.ndarray, drafts: np.ndarray, num_proposed: int, options: tuple[float, float]) -> int:
    """Drafts that are kept of one row, in float64."""
    threshold, alpha = options
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    for i in range(num_proposed):
        entropy = sum(-x * np.log(x) for x in p[i] if x > 0)
        if p[i, drafts[i]] <= min(threshold, alpha * np.exp(-entropy)):
            return i
    return num_proposed


def cases() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [ROWS,K+1,V] of every sharpness, some of them -inf; drafts; how many there are."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(ROWS, K + 1, V)) * draw.uniform(0, 4, (ROWS, K + 1, 1))
    logits = np.where(draw.random(logits.shape) < 0.2, -np.inf, logits)
    logits[..., 0] = np.maximum(logits[..., 0], -3.0)  # at least one is allowed
    return logits, draw.integers(V, size=(ROWS, K)), draw.integers(K + 1, size=ROWS)


@pytest.mark.parametrize("options", [tuple(DEFAULTS.values()), (0.3, 1.0), (1.0, 0.5), (0.02, 0.02)])
def test_drafts_are_kept_as_numpy_says(options):
    logits, drafts, num_proposed = cases()
    expected = np.array([reference(*row, options) for row in zip(logits, drafts, num_proposed, strict=True)])
    verdict, failed = verify(logits, drafts, num_proposed, options), expected < num_proposed
    assert 0.1 < failed.mean() < 0.9
    np.testing.assert_array_equal(verdict.num_accepted, expected)
    likeliest_there = logits[np.arange(ROWS), expected].argmax(axis=-1)
    np.testing.assert_array_equal(verdict.next_token[failed], likeliest_there[failed])


@pytest.mark.parametrize("num_proposed", [0, 2])
def test_behind_what_is_all_kept_a_token_is_drawn(num_proposed):
    p, rows = np.array([0.5, 0.3, 0.15, 0.05, 0.0]), 20_000
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(p), (rows, 3, V))
    verdict = verify(logits, np.zeros((rows, 2)), np.full(rows, num_proposed), tuple(DEFAULTS.values()))
    assert (verdict.num_accepted == num_proposed).all()
    assert exact.chi_square(np.bincount(verdict.next_token, minlength=V), p) > 1e-4


def test_greedy_requests_are_exact_and_seeds_give_the_same_tokens_twice():
    wishes = [*params((20,) * 3), *params((20,) * 3, temperature=1.0, seed=3)]
    prompts = (*PROMPTS[2:], *PROMPTS[2:])
    engine = new_engine("noisy", K, spec={"rejection_sample_method": "typical"})
    once, again = (texts(serve(engine, prompts, wishes)) for _ in range(2))
    assert once == again
    expected = plain(prompts, tuple(wishes))
    assert once[:3] == expected[:3]
    assert once[3:] != expected[3:]

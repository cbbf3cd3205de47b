"""Corner cases of the rules: strictness, empty residuals, rows with fewer drafts, ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng
from jaxspec.verify import block, greedy, standard
from jaxspec.verify.base import Case, Verdict, leading
from pallas_kernels.plain import argmax

LOG = lambda p: jnp.log(jnp.array(p, jnp.float32))
ROWS = 64


def proposal(tokens, probs, num_proposed) -> Proposal:
    probs = None if probs is None else jnp.array(probs, jnp.float32)
    return Proposal(jnp.array(tokens, jnp.int32), probs, jnp.array(num_proposed, jnp.int32))


def verify(rule, logits, proposal, seed=None, num_tokens=None) -> Verdict:
    """Without noise of the target's own."""
    rows = len(logits)
    seed, num_tokens = seeds(rows) if seed is None else seed, jnp.full(rows, 5) if num_tokens is None else num_tokens
    case = Case(logits, argmax(logits), proposal, seed, num_tokens, jnp.zeros(0))
    return jax.jit(lambda case: rule.verify(case))(case)  # traced anew: a test may have replaced the noise


def seeds(rows: int) -> jax.Array:
    return jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1)


def repeated(x, rows: int = ROWS) -> np.ndarray:
    return np.broadcast_to(np.array(x), (rows, *np.shape(x)))


RATIOS = pytest.mark.parametrize("rule", [standard, block])  # rules that look at p / q


@RATIOS
@pytest.mark.parametrize("q", [[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]], None])
def test_a_zero_never_accepts_what_the_target_forbids(q, rule, monkeypatch):
    """p(x) = 0 and u = 0: 0 * q < 0 is false."""
    monkeypatch.setattr(rng, "uniform", lambda keys: jnp.zeros(keys.shape))
    logits = LOG(repeated([[0.0, 0.4, 0.6], [0.3, 0.3, 0.4]]))
    probs = None if q is None else repeated(q)
    verdict = verify(rule, logits, proposal(repeated([0]), probs, [1] * ROWS))
    assert (verdict.num_accepted == 0).all()
    assert set(verdict.next_token.tolist()) <= {1, 2}


@RATIOS
def test_a_one_always_rejects_only_what_is_less_likely_than_proposed(rule, monkeypatch):
    """The largest uniform number is below 1, so p = q is always accepted."""
    monkeypatch.setattr(rng, "uniform", lambda keys: jnp.full(keys.shape, np.nextafter(np.float32(1), np.float32(0))))
    logits = LOG(repeated([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]], 3))
    drafts = proposal([[0], [1], [2]], repeated([[0.5, 0.26, 0.24]], 3), [1, 1, 1])
    verdict = verify(rule, logits, drafts)
    assert verdict.num_accepted.tolist() == [1, 0, 1]


def test_an_empty_residual_falls_back_to_the_target():
    """max(p - q, 0) may round to nothing: then p, and never NaN."""
    p = jnp.array(repeated([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], 2), jnp.float32)
    drafts = proposal([[0], [0]], repeated([[0.5, 0.3, 0.2]], 2), [1, 1])
    law = standard.residual_distribution(p, drafts, jnp.array([0, 1]))
    np.testing.assert_allclose(law, [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], rtol=1e-6)
    one_hot = proposal([[1], [1]], None, [1, 1])
    law = standard.residual_distribution(jnp.array(repeated([[0.0, 1.0, 0.0]] * 2, 2)), one_hot, jnp.array([0, 1]))
    np.testing.assert_allclose(law, [[0.0, 1.0, 0.0]] * 2)


@RATIOS
def test_a_rejected_one_hot_draft_is_not_recovered(rule):
    logits = LOG(repeated([[0.999, 0.0005, 0.0005], [1 / 3] * 3], 4096))
    drafts = proposal(repeated([1], 4096), None, [1] * 4096)
    verdict = verify(rule, logits, drafts)
    rejected = np.asarray(verdict.num_accepted) == 0
    assert rejected.sum() > 4000
    assert (np.asarray(verdict.next_token)[rejected] != 1).all()
    # Accepted with probability p(x) = 0.0005.
    assert (~rejected).sum() < 20


@pytest.mark.parametrize("rule", [standard, block, greedy])
def test_drafts_beyond_a_rows_own_number_do_not_count(rule):
    """K_b = 0..3 where all would be accepted: the extra token stands at K_b, and is drawn as a bonus."""
    p = np.eye(4)[[0, 1, 2, 3]]
    drafts = proposal(repeated([0, 1, 2], 4), repeated(np.eye(4)[[0, 1, 2]], 4), [0, 1, 2, 3])
    verdict = verify(rule, LOG(repeated(p, 4)), drafts)
    assert verdict.num_accepted.tolist() == [0, 1, 2, 3]
    assert verdict.next_token.tolist() == [0, 1, 2, 3]


@RATIOS
def test_without_drafts_a_token_is_drawn_from_the_target(rule):
    drafts = proposal(np.zeros((ROWS, 0)), None, [0] * ROWS)
    verdict = verify(rule, LOG(repeated([[0.0, 0.5, 0.5]])), drafts)
    assert (verdict.num_accepted == 0).all()
    assert set(verdict.next_token.tolist()) == {1, 2}


def test_ties_go_to_the_lowest_id():
    logits = jnp.array(repeated([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]], 2))
    verdict = verify(greedy, logits, proposal([[1], [2]], None, [1, 1]))
    assert verdict.num_accepted.tolist() == [1, 0]
    assert verdict.next_token.tolist() == [0, 1]


def test_only_leading_acceptances_count():
    accepted = jnp.array([[True, False, True], [True, True, True], [False, True, True], [True, True, True]])
    assert leading(accepted, jnp.array([3, 3, 3, 2])).tolist() == [1, 3, 0, 2]
    assert leading(jnp.zeros((2, 0), bool), jnp.array([0, 0])).tolist() == [0, 0]


@RATIOS
def test_a_row_does_not_depend_on_its_neighbours(rule):
    logits = jax.random.normal(jax.random.key(0), (ROWS, 3, 7))
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(1), (ROWS, 2, 7)))
    tokens = jax.random.randint(jax.random.key(2), (ROWS, 2), 0, 7)
    num_tokens = jnp.arange(ROWS, dtype=jnp.int32)
    order = jax.random.permutation(jax.random.key(3), ROWS)

    def run(rows):
        drafts = Proposal(tokens[rows], probs[rows], jnp.full(ROWS, 2))
        return verify(rule, logits[rows], drafts, seeds(ROWS)[rows], num_tokens[rows])

    straight, shuffled = run(jnp.arange(ROWS)), run(order)
    assert (straight.num_accepted[order] == shuffled.num_accepted).all()
    assert (straight.next_token[order] == shuffled.next_token).all()
    assert len(set(straight.num_accepted.tolist())) == 3


LARGE, TINY = 3e38, 1e-45
EXTREMES = {  # logits [T,V], drafts, q [K,V], drafts that there are -> drafts kept, ids that may follow
    "the largest numbers": ([[LARGE, -LARGE, 0.0]] * 3, [0, 0], [[1.0, 0.0, 0.0]] * 2, 2, 2, {0}),
    "hardly ever drafted": ([[0.0, -LARGE, -LARGE]] * 3, [0, 0], [[TINY, 0.5, 0.5]] * 2, 2, 2, {0}),
    "never emitted, hardly ever drafted": ([[-LARGE, 0.0, 0.0]] * 3, [0, 0], [[TINY, 0.5, 0.5]] * 2, 2, 0, {1, 2}),
    "never emitted, then likely": ([[-LARGE, 0.0, 0.0], [0.0, -LARGE, -LARGE], [0.0] * 3], [0, 0], None, 2, 0, {1, 2}),
    "one id is allowed": ([[-np.inf, 0.0, -np.inf]] * 3, [1, 1], [[0.0, 1.0, 0.0]] * 2, 2, 2, {1}),
    "q is nothing": ([[0.0, 0.0, -np.inf]] * 3, [2, 2], [[0.0] * 3] * 2, 0, 0, {0, 1}),
    "q is nothing behind the first": ([[0.0, -np.inf, -np.inf]] * 3, [0, 2], [[1.0, 0, 0], [0.0] * 3], 1, 1, {0}),
    "no numbers behind the drafts": ([[0.0, -LARGE, -LARGE], [0.0] * 3, [np.nan] * 3], [0, 0], None, 1, 1, {0, 1, 2}),
    "q is no number behind the drafts": ([[0.0, -LARGE, 0.0]] * 3, [0, 0], [[0.5, 0, 0.5], [np.nan] * 3], 1, 1, {0, 2}),
    "no drafts": ([[0.0, 0.0, -np.inf], [np.nan] * 3, [np.nan] * 3], [0, 0], None, 0, 0, {0, 1}),
}


@RATIOS
@pytest.mark.parametrize("case", EXTREMES)
def test_extremes(case, rule):
    logits, tokens, q, num_proposed, kept, following = EXTREMES[case]
    probs = None if q is None else repeated(q)
    drafts = proposal(repeated(tokens), probs, [num_proposed] * ROWS)
    verdict = verify(rule, jnp.array(repeated(logits), jnp.float32), drafts)
    assert set(verdict.num_accepted.tolist()) == {kept}
    assert set(verdict.next_token.tolist()) == following

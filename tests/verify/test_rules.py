"""Corner cases of the rules: strictness, empty residuals, rows with fewer drafts, ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Proposal
from jaxspec.sampling import rng
from jaxspec.verify import greedy, standard
from jaxspec.verify.base import Case, Verdict, leading
from pallas_kernels.likeliest_token.reference import likeliest

LOG = lambda p: jnp.log(jnp.array(p, jnp.float32))
ROWS = 64


def proposal(tokens, probs, num_proposed) -> Proposal:
    probs = None if probs is None else jnp.array(probs, jnp.float32)
    return Proposal(jnp.array(tokens, jnp.int32), probs, jnp.array(num_proposed, jnp.int32))


def verify(rule, logits, proposal, seed=None, num_tokens=None) -> Verdict:
    """Without noise of the target's own."""
    rows = len(logits)
    seed, num_tokens = seeds(rows) if seed is None else seed, jnp.full(rows, 5) if num_tokens is None else num_tokens
    return rule.verify(Case(logits, likeliest(logits), proposal, seed, num_tokens))


def seeds(rows: int) -> jax.Array:
    return jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1)


def repeated(x, rows: int = ROWS) -> np.ndarray:
    return np.broadcast_to(np.array(x), (rows, *np.shape(x)))


@pytest.mark.parametrize("q", [[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]], None])
def test_a_zero_never_accepts_what_the_target_forbids(q, monkeypatch):
    """p(x) = 0 and u = 0: 0 * q < 0 is false."""
    monkeypatch.setattr(rng, "uniform", lambda keys: jnp.zeros(keys.shape))
    logits = LOG(repeated([[0.0, 0.4, 0.6], [0.3, 0.3, 0.4]]))
    probs = None if q is None else repeated(q)
    verdict = verify(standard, logits, proposal(repeated([0]), probs, [1] * ROWS), seeds(ROWS), jnp.full(ROWS, 5))
    assert (verdict.num_accepted == 0).all()
    assert set(verdict.next_token.tolist()) <= {1, 2}


def test_a_one_always_rejects_only_what_is_less_likely_than_proposed(monkeypatch):
    """The largest uniform number is below 1, so p = q is always accepted."""
    monkeypatch.setattr(rng, "uniform", lambda keys: jnp.full(keys.shape, np.nextafter(np.float32(1), np.float32(0))))
    logits = LOG(repeated([[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]], 3))
    drafts = proposal([[0], [1], [2]], repeated([[0.5, 0.26, 0.24]], 3), [1, 1, 1])
    verdict = verify(standard, logits, drafts, seeds(3), jnp.full(3, 5))
    assert verdict.num_accepted.tolist() == [1, 0, 1]


def test_an_empty_residual_falls_back_to_the_target():
    """max(p - q, 0) may round to nothing: then p, and never NaN."""
    p = jnp.array(repeated([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], 2), jnp.float32)
    drafts = proposal([[0], [0]], repeated([[0.5, 0.3, 0.2]], 2), [1, 1])
    law = standard.extra_distribution(p, drafts, jnp.array([0, 1]))
    np.testing.assert_allclose(law, [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], rtol=1e-6)
    one_hot = proposal([[1], [1]], None, [1, 1])
    law = standard.extra_distribution(jnp.array(repeated([[0.0, 1.0, 0.0]] * 2, 2)), one_hot, jnp.array([0, 1]))
    np.testing.assert_allclose(law, [[0.0, 1.0, 0.0]] * 2)


def test_a_rejected_one_hot_draft_is_not_recovered():
    logits = LOG(repeated([[0.999, 0.0005, 0.0005], [1 / 3] * 3], 4096))
    drafts = proposal(repeated([1], 4096), None, [1] * 4096)
    verdict = verify(standard, logits, drafts, seeds(4096), jnp.full(4096, 5))
    rejected = np.asarray(verdict.num_accepted) == 0
    assert rejected.sum() > 4000
    assert (np.asarray(verdict.next_token)[rejected] != 1).all()
    # Accepted with probability p(x) = 0.0005.
    assert (~rejected).sum() < 20


def test_drafts_beyond_a_rows_own_number_do_not_count():
    """K_b = 0..3 where all would be accepted: the extra token stands at K_b, and is drawn as a bonus."""
    p = np.eye(4)[[0, 1, 2, 3]]
    drafts = proposal(repeated([0, 1, 2], 4), repeated(np.eye(4)[[0, 1, 2]], 4), [0, 1, 2, 3])
    for rule in (standard, greedy):
        verdict = verify(rule, LOG(repeated(p, 4)), drafts, seeds(4), jnp.full(4, 9))
        assert verdict.num_accepted.tolist() == [0, 1, 2, 3]
        assert verdict.next_token.tolist() == [0, 1, 2, 3]


def test_without_drafts_a_token_is_drawn_from_the_target():
    drafts = proposal(np.zeros((ROWS, 0)), None, [0] * ROWS)
    verdict = verify(standard, LOG(repeated([[0.0, 0.5, 0.5]])), drafts, seeds(ROWS), jnp.full(ROWS, 5))
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


def test_a_row_does_not_depend_on_its_neighbours():
    logits = jax.random.normal(jax.random.key(0), (ROWS, 3, 7))
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(1), (ROWS, 2, 7)))
    tokens = jax.random.randint(jax.random.key(2), (ROWS, 2), 0, 7)
    num_tokens = jnp.arange(ROWS, dtype=jnp.int32)
    order = jax.random.permutation(jax.random.key(3), ROWS)

    def run(rows):
        drafts = Proposal(tokens[rows], probs[rows], jnp.full(ROWS, 2))
        return verify(standard, logits[rows], drafts, seeds(ROWS)[rows], num_tokens[rows])

    straight, shuffled = run(jnp.arange(ROWS)), run(order)
    assert (straight.num_accepted[order] == shuffled.num_accepted).all()
    assert (straight.next_token[order] == shuffled.next_token).all()
    assert len(set(straight.num_accepted.tolist())) == 3

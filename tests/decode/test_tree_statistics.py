"""The statistics of test_statistics, of rounds that verify a tree."""

from __future__ import annotations

import pytest

from jaxspec.decode import round as decode_round
from jaxspec.drafters.trees.growth import Shape
from jaxspec.models.paged import PagedModel
from tests.decode.test_statistics import LEAST_P, REJECTED, compare, settings
from tests.support import grammars
from tests.support.launches import Setting

pytestmark = pytest.mark.thorough

DRAFTS, SIZE = 4, 3
TREE = Shape(width=2, depth=2, count=DRAFTS)


def test_a_tree_draws_from_the_targets_law():
    p_values, accepted = compare(DRAFTS, SIZE, 50_000, settings(SIZE, rule="coupled"), tree=TREE)
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.4).all()
    assert (accepted[:, 1] > 0.1).all()
    assert not accepted[:, 2:].any()


def test_a_tree_under_a_grammar():
    """Id 2 ends a text. A node's state is that of its own path."""
    automaton = grammars.of_states(SIZE, [{0: 1, 1: 0}, {0: 0, 1: 2, 2: 3}, {0: 1}], ends=(2,))
    rows = [Setting(t, rule="coupled", automaton=automaton, stop_ids=(2,)) for t in (0.7, 1.0)]
    rows += [Setting(1.0, rule="coupled")]
    p_values, accepted = compare(DRAFTS, SIZE, 50_000, rows, tree=TREE)
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.4).all()


def one_noise_for_all_positions(monkeypatch):
    right = decode_round.shared_noise
    monkeypatch.setattr(decode_round, "shared_noise", lambda seed, at, size: right(seed, 0 * at, size))


def keys_left_where_they_were(monkeypatch):
    monkeypatch.setattr(PagedModel, "keep", lambda self, cache, kept: cache)


@pytest.mark.parametrize("fault", [one_noise_for_all_positions, keys_left_where_they_were], ids=lambda f: f.__name__)
def test_planted_faults_are_rejected(fault, monkeypatch):
    fault(monkeypatch)
    p_values, _ = compare(DRAFTS, SIZE, 50_000, settings(SIZE, rule="coupled"), tree=TREE)
    assert (p_values < REJECTED).any()

"""The statistics of test_statistics, of rounds that verify a tree."""

from __future__ import annotations

import pytest

from jaxspec.decode import round as decode_round
from jaxspec.drafters.trees.growth import Shape
from jaxspec.models.paged import PagedModel
from tests.decode.test_statistics import LEAST_P, REJECTED, compare, settings

pytestmark = pytest.mark.thorough

DRAFTS, SIZE = 4, 3
TREE = Shape(width=2, depth=2, count=DRAFTS)


def test_a_tree_draws_from_the_targets_law():
    p_values, accepted = compare(DRAFTS, SIZE, 50_000, settings(SIZE, rule="coupled"), tree=TREE)
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.4).all()
    assert (accepted[:, 1] > 0.1).all()
    assert not accepted[:, 2:].any()


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

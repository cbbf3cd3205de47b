"""A request's tokens are a function of its own seed and wishes, never of what shares its batch; under the coupled rule
not of the drafts either."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.support.launches import Launches, Setting, blend, model
from tests.support.lively_models import reduced
from tests.support.sizes import cases

V, K, LENGTH, EACH = 6, 3, 24, 16
SEEDS = np.arange(EACH) * 7919 - 3  # some are negative
PROMPT = (0, 2, 1, 0, 2)

COUPLED = Setting(0.9, top_k=5, top_p=0.9, rule="coupled")
STANDARD = Setting(0.9, top_k=5, top_p=0.9)
GREEDY = Setting(0.0)
BATCH = (COUPLED, STANDARD, GREEDY, Setting(1.2, min_p=0.05), Setting(1.2, rule="coupled"), COUPLED)

TARGET = functools.partial(model, V, 5)
# what proposes -> (the drafter, whether it is greedy)
PROPOSERS = {
    "draft": (lambda: blend(TARGET(), model(V, 6), 0.5), False),
    "greedy draft": (lambda: blend(TARGET(), model(V, 6), 0.5), True),
    "reduced vocabulary": (lambda: reduced(blend(TARGET(), model(V, 6), 0.5)), False),
    "another draft": (lambda: model(V, 9), False),
    "lookup": (lambda: (1, 3), False),
    "nothing": (lambda: None, False),
}


@functools.cache
def launches(proposer: str) -> Launches:
    draft, greedy_draft = PROPOSERS[proposer]
    drafts = 0 if proposer == "nothing" else K
    how = {"length": LENGTH, "rows_each": EACH, "prompt": PROMPT, "compiler_options": None}
    return Launches(TARGET(), draft(), drafts, BATCH, greedy_draft=greedy_draft, **how)


def tokens(proposer: str, seeds=SEEDS, settings=BATCH) -> np.ndarray:
    """[settings, EACH, LENGTH]."""
    result = launches(proposer).run(seeds, settings)
    return result.new_tokens[:, :LENGTH].reshape(len(settings), EACH, LENGTH)


def test_neighbours_do_not_matter():
    there = tokens("draft")
    np.testing.assert_array_equal(there[0], there[5])
    order = [3, 1, 5, 0, 4, 2]
    np.testing.assert_array_equal(tokens("draft", settings=[BATCH[i] for i in order]), there[order])
    others = np.where(np.arange(EACH) % 2, SEEDS, SEEDS + 1000)
    again = tokens("draft", others, (COUPLED, STANDARD, *(GREEDY,) * 4))
    np.testing.assert_array_equal(again[:2, 1::2], there[:2, 1::2])
    assert (again[:2, ::2] != there[:2, ::2]).any(axis=-1).all()


@cases("proposer", [p for p in PROPOSERS if p != "draft"], quick=["lookup"], rest=["nothing"])
def test_coupled_tokens_do_not_depend_on_the_drafts(proposer):
    there, here = tokens("draft"), tokens(proposer)
    for row in (0, 2, 4, 5):  # the coupled ones and the greedy
        np.testing.assert_array_equal(here[row], there[row])
    if proposer != "nothing":
        assert launches(proposer).run(SEEDS).accepted.sum() > 0
    assert (here[1] != there[1]).any()  # the standard rule promises the law, not the tokens


def test_coupled_tokens_do_not_depend_on_the_number_of_drafts():
    rows = [Setting(0.9, top_k=5, top_p=0.9, rule="coupled", num_drafts=k) for k in (0, 1, 2, 3)]
    here = tokens("draft", settings=(*rows, STANDARD, GREEDY))
    for row in here[1:4]:
        np.testing.assert_array_equal(row, here[0])
    np.testing.assert_array_equal(here[0], tokens("draft")[0])


@pytest.mark.parametrize("change", [1, 1 << 32, -1 << 63])
def test_every_bit_of_a_seed_counts(change):
    there, here = tokens("draft"), tokens("draft", SEEDS ^ change)
    for row in (0, 1, 3, 4):
        assert (there[row] != here[row]).any(axis=-1).all()
    np.testing.assert_array_equal(there[2], here[2])

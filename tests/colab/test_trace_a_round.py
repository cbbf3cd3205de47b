"""trace_a_round: the round by hand is the engine's."""

from __future__ import annotations

import re

import pytest

from tests.colab.notebooks import both, execute, num_pictures, read, said

COMPARED = re.compile(r"by hand (\[.*\]), by the engine (\[.*\]): the same\n")
DRAFT = re.compile(r" ([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)  (accepted|rejected|not looked at)\n")


@both
def text(request, tmp_path_factory):
    stored = request.param == "stored"
    notebook = read("trace_a_round") if stored else execute("trace_a_round", {}, tmp_path_factory.mktemp("trace"))
    assert num_pictures(notebook) == 5
    return said(notebook)


def test_by_hand_and_by_the_engine(text):
    rows = COMPARED.findall(text)
    assert len(rows) == 2
    assert all(mine == its for mine, its in rows)


def test_the_pages_are_the_engines(text):
    assert float(re.search(r"our pages and the engine's: (\S+)", text)[1]) < 1e-3


def test_the_round_is_worth_looking_at(text):
    """Some of its four drafts are accepted and one is rejected, by the rule that is explained."""
    drafts = DRAFT.findall(text)
    outcomes = [outcome for *_, outcome in drafts]
    assert outcomes == ["accepted", "accepted", "rejected", "not looked at"]
    for *numbers, outcome in drafts:
        q, p, chance, u = map(float, numbers)
        digits = 0.0005 + 0.0005 * (1 + p / q) / q  # three are printed
        assert chance == pytest.approx(min(1.0, p / q), abs=digits)
        if outcome != "not looked at":
            assert (u < chance) == (outcome == "accepted")
    assert re.search(r"gained: , \|  you \|  take \(2 drafts and one token more\)", text)


def test_a_row_has_pages_apart(text):
    assert "block tables: [[0, 1, 4], [2, 3]]" in text


def test_round_after_round_writes_the_same_text(text):
    whole = re.search(r"and the whole text: '(.*)'\n", text)[1]
    rounds = re.search(r"round by round: (.*)\n", text)[1].split(" / ")
    assert "".join(rounds) in whole
    assert rounds[1] == ", you take", "the round that was traced"
    assert "the same text: True" in text

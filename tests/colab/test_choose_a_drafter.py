"""choose_a_drafter: every method writes the same text, and is told by what it costs and gains."""

from __future__ import annotations

import re

import pytest

from tests.colab.notebooks import execute, num_pictures, said

pytestmark = pytest.mark.thorough
METHODS = ["ngram", "suffix", "eagle3", "ngram+eagle3"]
SHORT = {"MAX_TOKENS = 64": "MAX_TOKENS = 16", "HEATS = 2": "HEATS = 1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    notebook = execute("choose_a_drafter", SHORT, tmp_path_factory.mktemp("choose"))
    assert num_pictures(notebook) == 3
    return said(notebook)


def test_no_method_changes_the_text(text):
    assert re.findall(r"(\S+) +same text as plain decoding: (\w+)", text) == [(name, "True") for name in METHODS]


def test_a_trained_draft_is_right_most_often(text):
    found = re.findall(r"(echo|fresh) +(\S+) +([\d.]+) tokens a round", text)
    lengths = {(kind, name): float(length) for kind, name, length in found}
    assert len(lengths) == 2 * len(METHODS)
    assert all(1.0 <= length <= 5.0 for length in lengths.values())
    assert lengths["fresh", "eagle3"] > max(lengths["fresh", name] for name in ("ngram", "suffix")) + 0.5


def test_what_a_round_costs(text):
    """What is looked up reads no weights; a head reads its own K times: about 15.4 million, in bfloat16. The target's,
    of 4 bits, are read in float32."""
    found = re.findall(r"(\S+) +(\d+) MB \+ (\d+) MB, ([\d.]+) plain steps by bytes, ([\d.]+) by the clock", text)
    sizes = {name: (int(target), int(drafter), float(steps)) for name, target, drafter, steps, _ in found}
    assert list(sizes) == METHODS
    for name, (target, drafter, steps) in sizes.items():
        assert target == pytest.approx(4 * 135, rel=0.05)
        assert drafter == (0 if "eagle3" not in name else pytest.approx(4 * 2 * 15.4, rel=0.1))
        assert steps == pytest.approx(1 + drafter / target, abs=0.01)


def test_predicted_and_measured(text):
    found = re.findall(r"(echo|fresh) +(\S+) +([\d.]+)x +([\d.]+)x +([\d.]+)x", text)
    assert len(found) == 2 * len(METHODS)
    assert all(float(x) > 0.1 for row in found for x in row[2:])

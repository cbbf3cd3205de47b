"""choose_a_drafter: every method writes the same text, and is told by what it costs and gains."""

from __future__ import annotations

import re

import pytest

from tests.colab.notebooks import both, execute, num_pictures, read, said

METHODS = {"stored": ["ngram", "suffix", "eagle3", "ngram+eagle3"], "executed": ["ngram", "eagle3"]}
SHORT = {
    "MAX_TOKENS = 64": "MAX_TOKENS = 16",
    "HEATS = 3": "HEATS = 1",
    '"suffix": {"method": "suffix"},': "",
    '"ngram+eagle3": {"method": "ngram+eagle3", "model": "smollm2-135m-eagle3"},': "",
}


@both
def run(request, tmp_path_factory):
    """The methods of a run and its text."""
    if request.param == "stored":
        notebook = read("choose_a_drafter")
    else:
        notebook = execute("choose_a_drafter", SHORT, tmp_path_factory.mktemp("choose"))
    assert num_pictures(notebook) == 3
    return METHODS[request.param], said(notebook)


def test_no_method_changes_the_text(run):
    methods, text = run
    assert re.findall(r"(\S+) +same text as plain decoding: (\w+)", text) == [(name, "True") for name in methods]


def test_a_trained_draft_is_right_most_often(run):
    methods, text = run
    found = re.findall(r"(echo|fresh) +(\S+) +([\d.]+) tokens a round", text)
    lengths = {(kind, name): float(length) for kind, name, length in found}
    assert len(lengths) == 2 * len(methods)
    assert all(1.0 <= length <= 5.0 for length in lengths.values())
    untrained = {"ngram", "suffix"} & set(methods)
    assert lengths["fresh", "eagle3"] > max(lengths["fresh", name] for name in untrained) + 0.5


def test_what_a_round_costs(run):
    """n-gram and suffix drafting read no weights. The head reads its own, 15.4 million, K times."""
    methods, text = run
    found = re.findall(r"(\S+) +(\d+) MB \+ (\d+) MB, ([\d.]+) plain steps by bytes, ([\d.]+) by the clock", text)
    sizes = {name: (int(target), int(drafter), float(steps)) for name, target, drafter, steps, _ in found}
    assert list(sizes) == methods
    for name, (target, drafter, steps) in sizes.items():
        assert target == pytest.approx(4 * 135, rel=0.05)
        assert drafter == (0 if "eagle3" not in name else pytest.approx(4 * 2 * 15.4, rel=0.1))
        assert steps == pytest.approx(1 + drafter / target, abs=0.01)


def test_predicted_and_measured(run):
    methods, text = run
    found = re.findall(r"(echo|fresh) +(\S+) +([\d.]+)x +([\d.]+)x +([\d.]+)x +([\d.]+)\n", text)
    assert len(found) == 2 * len(methods)
    assert all(float(x) > 0.1 for row in found for x in row[2:])

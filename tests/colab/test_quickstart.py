"""quickstart runs from top to bottom: with a tiny model, and with the pair that needs no hub."""

from __future__ import annotations

import re

import pytest

from tests.colab.notebooks import TINY, execute, num_pictures, said
from tests.support.model_folders import write_model

REAL = '"smollm2-135m-instruct", {"method": "ngram+eagle3", "model": "smollm2-135m-eagle3"}'
SHORT = {"max_tokens = 64": "max_tokens = 16"}
LENGTH = re.compile(r"\[([\d.]+) tokens a round\]")
SPEED = re.compile(r"K = (\d): +([\d.]+) tokens/s, ([\d.]+)x, same text: (\w+)")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return execute("quickstart", SHORT, tmp_path_factory.mktemp("quickstart"))


def test_it_runs_from_top_to_bottom(tmp_path):
    """With a tiny model that drafts for itself."""
    folder = str(write_model(tmp_path / "tiny"))
    tiny = {REAL: f'"{folder}", {{"method": "ngram+draft_model", "model": "{folder}"}}'}
    notebook = execute("quickstart", SHORT | tiny, tmp_path, TINY)
    text = said(notebook)
    assert "jaxspec is installed." in text
    assert "Only a CPU" in text
    assert len(LENGTH.findall(text)) == 4
    assert [(k, same) for k, _, _, same in SPEED.findall(text)] == [(k, "True") for k in "01234"]
    assert num_pictures(notebook) == 2


@pytest.mark.thorough
def test_it_says_what_it_found(executed):
    assert "smollm2-135m-instruct with {'method': 'ngram+eagle3', 'model': 'smollm2-135m-eagle3'}" in said(executed)
    assert num_pictures(executed) == 2


@pytest.mark.thorough
def test_it_generates(executed):
    text = said(executed)
    lengths = [float(x) for x in LENGTH.findall(text)]
    assert len(lengths) == 4
    # 2.4 measured. A single answer is of too few tokens here to tell much: the lowest of the four is 1.45.
    assert min(lengths) > 1.2
    assert sum(lengths) / 4 > 2.0, "the draft was trained for this target"


@pytest.mark.thorough
def test_speculation_changes_no_text(executed):
    rows = SPEED.findall(said(executed))
    assert [row[0] for row in rows] == list("01234")
    assert all(float(speed) > 0 and same == "True" for _, speed, _, same in rows)

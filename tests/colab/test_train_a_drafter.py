"""train_a_drafter: the loss falls, the drafter is read back, and changes no text."""

from __future__ import annotations

import re

import pytest

from tests.colab.notebooks import execute, num_pictures, said

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    short = {
        "pathlib.Path(tempfile.mkdtemp())": f"pathlib.Path({str(folder)!r})",
        "= 4_000, 128": "= 1_000, 128",
        "None, 40, 4, 4, 10": "None, 16, 4, 4, 8",
        "MAX_TOKENS = 64": "MAX_TOKENS = 16",
        "in range(3)": "in range(1)",
    }
    notebook = execute("train_a_drafter", short, folder)
    assert num_pictures(notebook) == 3
    assert {path.name for path in (folder / "draft").iterdir()} >= {"params", "metrics.jsonl", "curves.png"}
    return said(notebook)


def number(text: str, pattern: str) -> float:
    return float(re.search(pattern, text)[1])


def test_the_loss_fell(text):
    assert "draft_model for smollm2-135m-instruct on cpu" in text
    first, last = number(text, r"loss ([\d.]+) at step 8\b"), number(text, r"([\d.]+) at step 16\b")
    assert last < first - 0.5


def test_it_was_measured(text):
    assert number(text, r"best acceptance length ([\d.]+)") >= 1.0
    assert 1.0 <= number(text, r"\n([\d.]+) tokens a round") <= 3.0
    assert number(text, r"speed-up ([\d.]+)x") > 0.2


def test_it_changes_no_text(text):
    assert "same text: True" in text

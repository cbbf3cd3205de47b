"""train_a_drafter: the loss falls, the drafter is read back, and changes no text."""

from __future__ import annotations

import re

from tests.colab.notebooks import both, execute, num_pictures, read, said


@both
def text(request, tmp_path_factory):
    if request.param == "stored":
        notebook = read("train_a_drafter")
        assert num_pictures(notebook) == 3
        return said(notebook)
    folder = tmp_path_factory.mktemp("train")
    short = {
        "pathlib.Path(tempfile.mkdtemp())": f"pathlib.Path({str(folder)!r})",
        "= 4_000, 128": "= 1_000, 128",
        "None, 40, 4, 4, 10": "None, 16, 4, 4, 8",
        "NUM_DRAFTS = 4, 2": "NUM_DRAFTS = 2, 2",
        "MAX_TOKENS = 64": "MAX_TOKENS = 16",
        "in range(3)": "in range(1)",
    }
    notebook = execute("train_a_drafter", short, folder)
    assert num_pictures(notebook) == 3
    return said(notebook)


def number(text: str, pattern: str) -> float:
    return float(re.search(pattern, text)[1])


def test_the_loss_fell(text):
    assert "draft_model for smollm2-135m-instruct on cpu" in text
    assert number(text, r", ([\d.]+) at step \d+\n") < number(text, r"loss ([\d.]+) at step") - 0.5


def test_it_is_saved(text):
    saved = re.search(r"saved: (.*)\n", text)[1].split(", ")
    assert set(saved) >= {"params", "metrics.jsonl", "curves.png"}


def test_it_was_measured(text):
    assert number(text, r"best acceptance length ([\d.]+)") >= 1.0
    assert 1.0 <= number(text, r"\n([\d.]+) tokens a round") <= 3.0
    assert number(text, r"speed-up ([\d.]+)x") > 0.2


def test_it_changes_no_text(text):
    assert "same text: True" in text

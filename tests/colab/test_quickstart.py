"""quickstart runs from top to bottom: with a tiny model, and with the pair that needs no hub."""

from __future__ import annotations

import ast
import re

import pytest

from jaxspec.bench.presets import preset
from jaxspec.hardware.chips import chips
from jaxspec.inspect.fit import Wanted, fit
from tests.colab.notebooks import FOLDER, TINY, execute, num_pictures, read, said
from tests.support.model_folders import write_model
from tests.support.published_shapes import assistant, published

REAL = '"smollm2-135m-instruct", {"method": "ngram+eagle3", "model": "smollm2-135m-eagle3"}'
SHORT = {"max_tokens = 64": "max_tokens = 16", "HEATS = 3": "HEATS = 1"}
FEW = {"NUM_DRAFTS = 4": "NUM_DRAFTS = 2"}
MEAN = 1.7  # tokens a round: at least, for 2 drafts or more
LENGTH = re.compile(r"\[([\d.]+) tokens a round\]")
SPEED = re.compile(r"K = (\d): +([\d.]+) tokens/s, ([\d.]+)x, same text: (\w+)")


# `make demo` runs the same pair.
MARKS = (pytest.mark.thorough, pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=["stored", pytest.param("executed", marks=MARKS)])
def notebook(request, tmp_path_factory):
    if request.param == "stored":
        return read("quickstart")
    return execute("quickstart", SHORT | FEW, tmp_path_factory.mktemp("quickstart"))


@pytest.mark.thorough
def test_it_runs_from_top_to_bottom(tmp_path):
    """With a tiny model that drafts for itself."""
    folder = str(write_model(tmp_path / "tiny"))
    tiny = {REAL: f'"{folder}", {{"method": "ngram+draft_model", "model": "{folder}"}}'}
    notebook = execute("quickstart", SHORT | FEW | tiny, tmp_path, TINY)
    text = said(notebook)
    assert "jaxspec is installed." in text
    assert "Only a CPU" in text
    assert len(LENGTH.findall(text)) == 4
    assert [(k, same) for k, _, _, same in SPEED.findall(text)] == [(k, "True") for k in "012"]
    assert num_pictures(notebook) == 2


def test_it_says_what_it_found(notebook):
    assert "smollm2-135m-instruct with {'method': 'ngram+eagle3', 'model': 'smollm2-135m-eagle3'}" in said(notebook)
    assert num_pictures(notebook) == 2


def test_it_generates(notebook):
    lengths = [float(x) for x in LENGTH.findall(said(notebook))]
    assert len(lengths) == 4
    # A single answer is of too few tokens to tell much.
    assert min(lengths) > 1.2
    assert sum(lengths) / 4 > MEAN, "the draft was trained for this target"


def test_speculation_changes_no_text(notebook):
    rows = SPEED.findall(said(notebook))
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert len(rows) >= 3
    assert all(float(speed) > 0 and same == "True" for _, speed, _, same in rows)


@pytest.mark.parametrize(("chip", "fits"), [("v5e", True), ("L4", True), ("T4", False)])
def test_gemma_is_loaded_where_it_fits(chip, fits):
    """Counted from shapes."""
    (line,) = re.findall(r"^SMALL = (.+)$", (FOLDER / "quickstart.py").read_text(), re.MULTILINE)
    ((name, form, needed),) = ast.literal_eval(line)
    kind = chips(chip).kind
    assert (kind.programs_memory / 1e9 >= needed * (2 if kind.device.lacks_bfloat16 else 1)) == fits
    target = published("gemma-4-e2b")
    sizes = {"quantization": form, "max_model_len": 512, "max_num_seqs": 4, "num_speculative_tokens": 4}
    found = fit(Wanted(target, assistant("gemma-4-e2b", target), chips(chip), **sizes))
    assert (found.rows >= 4) == fits
    assert name == "google/gemma-4-E2B-it"


@pytest.mark.parametrize(
    ("chip", "chosen"), [("v5e", ("Qwen/Qwen3-8B", "int8")), ("T4", None), ("H100", ("Qwen/Qwen3-8B", None))]
)
def test_the_pair_that_it_chooses_fits(chip, chosen):
    """Counted from shapes; `tests/decode/test_tpu_full.py` compiles the one for a TPU v5e."""
    (line,) = re.findall(r"^LARGE = (.+)$", (FOLDER / "quickstart.py").read_text(), re.MULTILINE)
    kind = chips(chip).kind
    factor = 2 if kind.device.lacks_bfloat16 else 1
    fitting = [pair for *pair, needed in ast.literal_eval(line) if kind.programs_memory / 1e9 >= needed * factor]
    assert (tuple(fitting[0]) if fitting else None) == chosen
    for name, form in fitting:
        target = preset(name.removeprefix("Qwen/").lower())
        sizes = {"quantization": form, "max_model_len": 512, "max_num_seqs": 4, "num_speculative_tokens": 4}
        found = fit(Wanted(target, preset("qwen3-0.6b"), chips(chip), **sizes))
        assert found.rows >= 4

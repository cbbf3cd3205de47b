"""The head that comes with jaxspec, on prompts that were not in its training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import checkpoints
from checkpoints.sources import DRAFTS
from jaxspec import LLM, SamplingParams
from jaxspec.inspect import info
from jaxspec.train import evaluate
from tests.support.root import ROOT

((TARGET, DRAFT),) = DRAFTS.items()
FOLDER = Path(checkpoints.__file__).parent / DRAFT


def test_small_enough_to_ship():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 40e6
    assert {"model.safetensors", "recipe.json", "metrics.jsonl", "curves.png", "README.md"} <= {
        path.name for path in FOLDER.iterdir()
    }


def test_what_is_said_of_it():
    """Its card has the number of its parameters as they are, and nobody else says it again."""
    document = info.describe(TARGET, DRAFT)["draft"]
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{document['parameters'] / 1e6:.1f} million parameters of its own" in card
    said = r"[\d.,]+ million parameters"
    assert len(re.findall(said, card)) == 1
    for other in ("README.md", "colab/quickstart.py", "colab/quickstart.ipynb", "colab/README.md"):
        assert not re.findall(said, (ROOT / other).read_text(encoding="utf-8")), other


@pytest.mark.thorough
@pytest.mark.exhaustive
@pytest.mark.real
def test_it_drafts_for_its_target():
    texts = evaluate.read_prompts(evaluate.HELDOUT)
    llm = LLM(TARGET, speculative_config={"model": DRAFT, "adaptive": False}, max_num_seqs=8, max_model_len=256)
    prompts = [llm.render_chat([{"role": "user", "content": text}]) for said in texts.values() for text in said[:2]]
    answers = lambda k: llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=64, num_speculative_tokens=k), progress=False
    )
    drafted = answers(4)
    assert llm.metrics.mean_acceptance_length > 2.35  # 2.46 of eight prompts; for all 64, see its model card
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in answers(0)]

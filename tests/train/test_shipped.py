"""The draft that comes with jaxspec, on prompts that were not in its training."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoints
from checkpoints.sources import DRAFTS
from jaxspec import LLM, SamplingParams
from jaxspec.train import evaluate

((TARGET, DRAFT),) = DRAFTS.items()
FOLDER = Path(checkpoints.__file__).parent / DRAFT


def test_small_enough_to_ship():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 40e6
    assert {"jaxspec.json", "recipe.json", "metrics.jsonl", "curves.png", "README.md"} <= {
        path.name for path in FOLDER.iterdir()
    }


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

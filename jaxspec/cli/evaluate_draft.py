"""jaxspec evaluate-draft"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.shared import MODEL_HELP, AsJson, Dtype
from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.progress import say


def evaluate_draft(
    target: Annotated[str, typer.Option(help=MODEL_HELP)],
    draft: Annotated[str, typer.Option(help="The draft to be measured.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="What users say: {category: [text, ...]}; 64 texts that come along."),
    ] = None,
    k: Annotated[
        int, typer.Option("-k", "--num-speculative-tokens", help="Drafts a round.")
    ] = SpeculativeConfig.num_speculative_tokens,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to each prompt, in tokens.")] = 128,
    dtype: Dtype = EngineConfig.dtype,
    as_json: AsJson = False,
) -> None:
    """How many of a draft's tokens a model accepts, greedy and at temperature 0.7."""
    from jaxspec.train import evaluate

    texts = evaluate.read_prompts(prompts or evaluate.HELDOUT)  # before the loading
    say(f"loading {target} and {draft} ...")
    document = evaluate.evaluate(target, draft, texts, num_speculative_tokens=k, max_tokens=max_tokens, dtype=dtype)
    if as_json:
        print(json.dumps(document))
    else:
        evaluate.show(document)

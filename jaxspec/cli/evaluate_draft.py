"""The command `jaxspec evaluate-draft`."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.bench.bench_options import listed
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import ENGINE, MODEL_HELP, AsJson
from jaxspec.cli.shared import OWN as SHARED
from jaxspec.common.errors import UserError
from jaxspec.common.progress import write_line
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.verify import rules

TEMPERATURES = "0,0.7"
OWN = SHARED | {"max_num_seqs": CommandOption(default=None, help="Answers decoded together; default: all, on CPU 16.")}
Rule = enum.StrEnum("Rule", {name: name for name in rules.NAMES if name != "synthetic"})  # type: ignore[misc]


def evaluate_draft(
    *,
    target: Annotated[str, typer.Option(help=MODEL_HELP)],
    draft: Annotated[str, typer.Option(help="The draft to be measured.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="User messages, {category: [text, ...]}; default: 64 built-in texts.",
        ),
    ] = None,
    drafts: Annotated[dict[str, Any], Fields(SpeculativeConfig, ("num_speculative_tokens",), OWN)],
    tree: Annotated[
        str | None, typer.Option(metavar="W,D,N", help="Width, depth and nodes of a draft tree in place of -k: 4,4,17.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to each prompt, in tokens.")] = 128,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas; 0 is greedy.")] = TEMPERATURES,
    rule: Annotated[
        Rule | None,
        typer.Option(
            "--rejection-sample-method",
            help=f"The acceptance rule of temperatures above 0; {rules.UNSEEDED} by default; a tree has its own.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("-n", "--samples", min=1, help="Answers to each prompt; 2 or more give a standard error."),
    ] = 1,
    draft_quantization: Annotated[
        str | None, typer.Option(help="Form of the draft's weights, as --quantization for the target; default: none.")
    ] = None,
    engine: Annotated[dict[str, Any], Fields(EngineConfig, ENGINE, OWN)],
    as_json: AsJson = False,
) -> None:
    """Measure how many of a draft's tokens a model accepts."""
    from jaxspec.train import evaluate

    texts = evaluate.read_prompts(prompts or evaluate.HELDOUT)  # read before the models are loaded
    temperatures = listed("--temperature", temperature, float, least=0.0)
    sizes = listed("--tree", tree, int, least=1, repeats=True) if tree else ()
    if tree and (len(sizes) != 3 or drafts):
        raise UserError(f"--tree {tree}: give width,depth,nodes, such as 4,4,17, and leave -k out")
    write_line(f"loading {target} and {draft} ...")
    how: dict[str, Any] = {"tree": sizes, "max_tokens": max_tokens, "temperatures": temperatures} | drafts | engine
    how["draft_quantization"] = draft_quantization
    document = evaluate.evaluate(target, draft, texts, rule=rule, samples=samples, **how)
    if as_json:
        print(json.dumps(document))
    else:
        evaluate.show(document)

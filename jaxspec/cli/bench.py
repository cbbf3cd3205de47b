"""jaxspec bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.bench.bench_options import BenchOptions, Load, listed, stages
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import MODEL_HELP, AsJson
from jaxspec.drafters.methods import METHODS

SUBJECT = ("preset", "model", "draft", "batch_sizes", "contexts", "ks", "tree", "lengths", "rates", "dtype", "stages")
EXECUTION = ("temperature", "kernels", "launches", "tensor_parallel_size", "draft_tensor_parallel_size")
OWN = {
    "model": CommandOption(help=MODEL_HELP),
    "batch_sizes": CommandOption(flags=("--batch-size",), kind=str),
    "contexts": CommandOption(flags=("--context",), kind=str),
    "ks": CommandOption(flags=("-k", "--k", "--num-speculative-tokens"), kind=str),
    "tree": CommandOption(flags=("--tree",), kind=str),
    "lengths": CommandOption(flags=("--synthetic-acceptance-length",), kind=str),
    "rates": CommandOption(flags=("--synthetic-acceptance-rates",), kind=str),
    "prompt_tokens": CommandOption(flags=("--prompt-tokens",), kind=str),
    "output_tokens": CommandOption(flags=("--output-tokens",), kind=str),
    "stages": CommandOption(kind=str, default=None),
}
LOAD = ("requests", "prompt_tokens", "output_tokens", "rate", "max_model_len", "runs", "seed")
# Options that are lists: field, type of the entries, least value.
LISTS = (
    *(("batch_sizes", int, 1), ("contexts", int, 2), ("ks", int, 1), ("tree", int, 1), ("lengths", float, 1)),
    *(("rates", float, 0), ("prompt_tokens", int, 2), ("output_tokens", int, 1)),
)
MAY_REPEAT = ("tree", "rates", "prompt_tokens", "output_tokens")


def bench(
    *,
    subject: Annotated[dict[str, Any], Fields(BenchOptions, SUBJECT, OWN)],
    never_slower: Annotated[bool, typer.Option("--never-slower", help="Off, always K and adaptive K.")] = False,
    execution: Annotated[dict[str, Any], Fields(BenchOptions, EXECUTION)],
    workload: Annotated[dict[str, Any], Fields(Load, LOAD, OWN)],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Of the stage load: {category: [text, ...]} in place of random prompts."
        ),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw what was measured.")] = None,
) -> None:
    """Time every stage beside what the device could do at best."""
    if not subject.keys() & {"preset", "model"}:
        subject["preset"] = "smollm2-135m"
    for name, kind, least in LISTS:
        for given in (subject, workload):
            if name in given:
                given[name] = listed(OWN[name].flags[0], given[name], kind, least, repeats=name in MAY_REPEAT)
    draft = subject.get("draft") or subject.get("preset", "").partition("+")[2]
    is_model = bool(draft) and draft not in METHODS  # else a method such as a head, which does not decode by itself
    subject["stages"] = stages(subject.get("stages"), never_slower=never_slower, draft=is_model)
    if prompts is not None:
        from jaxspec.train.evaluate import read_prompts

        workload["texts"] = tuple(text for texts in read_prompts(prompts).values() for text in texts)
    chosen = BenchOptions(**subject, **execution, load=Load(**workload))
    from jaxspec.bench.measure import bench

    bench(chosen, as_json=as_json, plot=plot)

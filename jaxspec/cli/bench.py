"""The command `jaxspec bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.bench.bench_options import BenchOptions, listed, stages
from jaxspec.bench.load_options import Load
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import MODEL_HELP, AsJson
from jaxspec.drafters.methods import METHODS

SUBJECT = (
    "preset",
    "model",
    "draft",
    "batch_sizes",
    "contexts",
    "ks",
    "tree",
    "lengths",
    "rates",
    "dtype",
    "quantization",
    "draft_quantization",
    "kv_cache_dtype",
    "stages",
)
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
# Options whose value is a list of numbers: (field, type of the numbers, smallest allowed number).
LISTS = (
    *(("batch_sizes", int, 1), ("contexts", int, 2), ("ks", int, 1), ("tree", int, 1), ("lengths", float, 1)),
    *(("rates", float, 0), ("prompt_tokens", int, 2), ("output_tokens", int, 1)),
)
NEVER_SLOWER = "Compare decoding without drafts, with always K drafts and with adaptive K."
MAY_REPEAT = ("tree", "rates", "prompt_tokens", "output_tokens")


def bench(
    *,
    subject: Annotated[dict[str, Any], Fields(BenchOptions, SUBJECT, OWN)],
    never_slower: Annotated[
        bool,
        typer.Option("--never-slower", help=NEVER_SLOWER),
    ] = False,
    execution: Annotated[dict[str, Any], Fields(BenchOptions, EXECUTION)],
    workload: Annotated[dict[str, Any], Fields(Load, LOAD, OWN)],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Prompts of the stage load, {category: [text, ...]}, in place of random ones."
        ),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a plot of the results.")] = None,
) -> None:
    """Time every stage beside what the device could do at best."""
    if not subject.keys() & {"preset", "model"}:
        subject["preset"] = "smollm2-135m"
    for name, kind, least in LISTS:
        for given in (subject, workload):
            if name in given:
                given[name] = listed(OWN[name].flags[0], given[name], kind, least, repeats=name in MAY_REPEAT)
    draft = subject.get("draft") or subject.get("preset", "").partition("+")[2]
    # A method's name, such as eagle3, is no model here: the method's head cannot decode alone.
    is_model = bool(draft) and draft not in METHODS
    subject["stages"] = stages(subject.get("stages"), never_slower=never_slower, draft=is_model)
    if prompts is not None:
        from jaxspec.train.evaluate import read_prompts

        workload["texts"] = tuple(text for texts in read_prompts(prompts).values() for text in texts)
    chosen = BenchOptions(**subject, **execution, load=Load(**workload))
    from jaxspec.bench.measure import bench

    bench(chosen, as_json=as_json, plot=plot)

"""jaxspec bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.shared import MODEL_HELP, AsJson


def bench(
    preset: Annotated[str | None, typer.Option(help="Random weights, public shapes: qwen3-8b+qwen3-0.6b.")] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    draft: Annotated[str | None, typer.Option(help="The draft of --model; n-gram without one.")] = None,
    batch_size: Annotated[str, typer.Option(help="One or several: 1,16.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens in the caches, one or several.")] = "512",
    k: Annotated[str, typer.Option("-k", "--k", "--num-speculative-tokens", help="One or several: 2,4,6.")] = "4",
    synthetic_acceptance_length: Annotated[
        str | None, typer.Option(help="Tokens a round, one or several; real acceptance without it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    stages: Annotated[str | None, typer.Option(help="Of target,draft,round,...; all but adaptive.")] = None,
    never_slower: Annotated[bool, typer.Option("--never-slower", help="Off, always K and adaptive K.")] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    kernels: Annotated[str | None, typer.Option(help="reference or pallas; the platform's best.")] = None,
    launches: Annotated[int, typer.Option(help="Timed launches a figure.")] = 12,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw speed and time per round.")] = None,
) -> None:
    """Time every stage beside what the device could do at best."""
    from jaxspec.bench import options

    lengths = synthetic_acceptance_length
    if preset is None and model is None:
        preset = "smollm2-135m"
    chosen = options.Options(
        preset=preset,
        model=model,
        draft=draft,
        batch_sizes=options.listed("--batch-size", batch_size),
        contexts=options.listed("--context", context, least=2),
        ks=options.listed("-k", k),
        lengths=() if lengths is None else options.listed("--synthetic-acceptance-length", lengths, float),
        dtype=dtype,
        stages=options.stages(stages, never_slower=never_slower, draft=bool(draft or (preset and "+" in preset))),
        temperature=temperature,
        kernels=kernels,
        launches=launches,
    )
    from jaxspec.bench.measure import bench

    bench(chosen, as_json=as_json, plot=plot)

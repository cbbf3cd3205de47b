"""jaxspec generate-data"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.exits import keeping
from jaxspec.cli.shared import MODEL_HELP, AsJson
from jaxspec.progress import say


def generate_data(
    target: Annotated[str, typer.Option(help="The model that writes. " + MODEL_HELP)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the shards; those that are there are kept.")],
    tokens: Annotated[int, typer.Option(help="Generate at least so many, prompts included.")] = 10_000_000,
    seed: Annotated[int, typer.Option(help="Of prompts and samples.")] = 0,
    length: Annotated[int, typer.Option(help="Longest sequence, prompt included, in tokens.")] = 512,
    shard_size: Annotated[int, typer.Option(help="Sequences of a shard.")] = 4096,
    mixture: Annotated[
        str | None,
        typer.Option(help="Shares of chat, story, code, summary, rewrite, list, translate, free, self: chat:2,self:1."),
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help="Shares of temperatures; 0:0.5,0.7:0.4,1:0.1.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Sequences decoded together; 2048 on GPU, 512 on TPU, 16 on CPU.")
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="The I-th of N processes, a device each, that fill the folder together.")
    ] = "1/1",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto is what the device does best.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a model write what a draft is trained on."""
    from jaxspec.train.data_options import MIXTURE, TEMPERATURES, DataOptions, part_of, shares
    from jaxspec.train.generate import engine_options, generate, kept

    options = DataOptions(
        tokens=tokens,
        seed=seed,
        length=length,
        shard_size=shard_size,
        mixture=MIXTURE if mixture is None else shares("--mixture", mixture),
        temperatures=TEMPERATURES if temperatures is None else shares("--temperatures", temperatures, float),
        rows=rows,
        part=part_of(part),
    )
    with keeping(lambda: kept(out)):
        import checkpoints
        from jaxspec.llm import LLM

        say(f"loading {target} ...")
        name = checkpoints.resolve(target).name
        written = generate(LLM(target, dtype=dtype, **engine_options(options)), out, options, target=name)
    if as_json:
        print(json.dumps(written))
    else:
        print(f"{written['sequences']} sequences, {written['tokens']} tokens in {written['shards']} shards: {out}")

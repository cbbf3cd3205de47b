"""The command `jaxspec generate-data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.cli.exits import keeping
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import MODEL_HELP, AsJson
from jaxspec.cli.shared import OWN as SHARED
from jaxspec.common.errors import UserError
from jaxspec.common.progress import write_line
from jaxspec.options.engine import EngineConfig
from jaxspec.train.data_options import TEMPERATURES, DataOptions, part_of, shares

NAMES = ("tokens", "seed", "length", "shard_size", "mixture", "temperatures", "rows", "part")
OF_ENGINE = ("tokenizer", "revision", "tensor_parallel_size", "dtype", "kernels", "compilation_cache")
ALSO = {"max_model_len": "length", "max_num_seqs": "rows"}  # field of EngineConfig -> field of DataOptions that sets it
OWN = SHARED | {
    "mixture": CommandOption(kind=str, default=None),
    "temperatures": CommandOption(
        kind=str,
        default=None,
        help=f"Shares of temperatures; {','.join(f'{t:g}:{share:g}' for t, share in TEMPERATURES.items())}.",
    ),
    "part": CommandOption(kind=str, default="1/1", metavar="I/N"),
}


def generate_data(
    target: Annotated[str, typer.Option(help="The target, which writes the data. " + MODEL_HELP)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the shards; existing ones are kept.")],
    given: Annotated[dict[str, Any], Fields(DataOptions, NAMES, OWN, ALSO)],
    engine: Annotated[dict[str, Any], Fields(EngineConfig, OF_ENGINE, OWN)],
    as_json: AsJson = False,
) -> None:
    """Let a model write what a draft is trained on."""
    if "mixture" in given:
        given["mixture"] = shares("--mixture", given["mixture"])
    if "temperatures" in given:
        given["temperatures"] = shares("--temperatures", given["temperatures"], float)
    options = DataOptions(**given | {"part": part_of(given["part"])})
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: name a folder")
    from jaxspec.train.generate import generate, kept

    with keeping(lambda: kept(out)):
        import checkpoints
        from jaxspec.api.llm import LLM
        from jaxspec.train.writer import engine_options

        write_line(f"loading {target} ...")
        source = checkpoints.resolve(target, revision=engine.get("revision"))
        rows = engine_options(options, checkpoints.load_config(source), engine["dtype"])
        llm = LLM(target, **rows, **engine)
        written = generate(llm, out, options, target=source.name)
    if as_json:
        print(json.dumps(written))
    else:
        print(f"{written['sequences']} sequences, {written['tokens']} tokens in {written['shards']} shards: {out}")

"""jaxspec info"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jaxspec.accelerators import ACCELERATORS
from jaxspec.cli.shared import MODEL_HELP, AsJson


def info(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    draft: Annotated[str | None, typer.Option(help="Tell whether this draft fits the model.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="An accelerator that need not be here: " + ", ".join(ACCELERATORS) + ". Default: this machine's."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Rows of the engine whose programs are listed; with --json by their names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a model is and what it needs, without loading its weights."""
    from jaxspec import info

    document = info.describe(model, draft, device, max_num_seqs)
    if as_json:
        print(json.dumps(document))
    else:
        info.show(document)

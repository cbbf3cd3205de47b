"""jaxspec info"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jaxspec.cli.shared import MODEL_HELP, AsJson


def info(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    draft: Annotated[str | None, typer.Option(help="Tell whether this draft fits the model.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a model is and what it needs, without loading its weights."""
    from jaxspec import info

    document = info.describe(model, draft)
    if as_json:
        print(json.dumps(document))
    else:
        info.show(document)

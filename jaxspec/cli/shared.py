"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxspec.cli.fields import sentences
from jaxspec.config import EngineConfig

MODEL_HELP = "Hub id, local folder, .gguf file, or an embedded model's name."
DTYPE_HELP = sentences(EngineConfig)["dtype"]

Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

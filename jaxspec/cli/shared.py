"""What several commands share: the embedded pair, and options."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxspec.cli.fields import sentences
from jaxspec.config import EngineConfig

EMBEDDED, DRAFT = "smollm2-135m-instruct", "smollm2-135m-draft"
MODEL_HELP = "Hub id, local folder, .gguf file, or an embedded model's name."

# Of EngineConfig.
Dtype = Annotated[str, typer.Option(help=sentences(EngineConfig)["dtype"])]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

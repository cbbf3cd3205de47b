"""jaxspec convert"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.shared import MODEL_HELP
from jaxspec.common.progress import write_line

TO = "jaxspec, or, of a head, speculators: that library's format."
BITS = "8 for matrices of integers and a power of two for every 32 of them: half of the bytes; for drafts."
TARGET = "With --to speculators: the model that the head drafts for, a hub id or a folder with its safetensors."


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[str, typer.Option(help=TO)] = "jaxspec",
    target: Annotated[str | None, typer.Option(help=TARGET)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored.")] = None,
    weight_bits: Annotated[int | None, typer.Option(help=BITS)] = None,
) -> None:
    """Write a model as a self-contained orbax folder, which loads fastest; a head in safetensors."""
    from jaxspec.common.values import one_of
    from jaxspec.options.engine import DTYPES

    if dtype is not None:
        one_of("dtype", dtype, DTYPES[1:])
    from jaxspec.loading.convert import convert as converted

    write_line(f"converting {source} ...")
    print(converted(source, destination, to=to, target=target, dtype=dtype, weight_bits=weight_bits))

"""The command `jaxspec convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.shared import MODEL_HELP
from jaxspec.common.progress import write_line

TO = (
    "Format to write: jaxspec; safetensors (a model in 8 bits, as vLLM and transformers read it); speculators (a head, "
    "in that library's format)."
)
FORM = "Form of a model's matrices, such as int8 or fp8, which they keep when they are loaded; default: as stored."
BITS = "8 stores matrices as 8-bit integers with a power of two for every 32, in half of the bytes; for drafts."
TARGET = "With --to speculators: the model that the head drafts for, a hub id or a folder with its safetensors."
DTYPE = "Dtype to write: float32, bfloat16 or float16; default: as stored."


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[str, typer.Option(help=TO)] = "jaxspec",
    target: Annotated[str | None, typer.Option(help=TARGET)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE)] = None,
    weight_bits: Annotated[int | None, typer.Option(help=BITS)] = None,
    quantization: Annotated[str | None, typer.Option(help=FORM)] = None,
) -> None:
    """Write a model as a self-contained orbax folder, which loads fastest, or in 8 bits; a head in safetensors."""
    from jaxspec.common.values import one_of
    from jaxspec.options.engine import DTYPES

    if dtype is not None:
        one_of("dtype", dtype, DTYPES[1:])
    from jaxspec.loading.convert import convert as converted

    write_line(f"converting {source} ...")
    written = converted(
        source, destination, to=to, target=target, dtype=dtype, weight_bits=weight_bits, quantization=quantization
    )
    print(written)

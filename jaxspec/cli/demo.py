"""jaxspec demo"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import DTYPE_HELP, AsJson
from jaxspec.demo.demo_options import DemoOptions

NAMES = [field.name for field in dataclasses.fields(DemoOptions)]
OWN = {"dtype": CommandOption(help=DTYPE_HELP)}


def demo(
    options: Annotated[dict[str, Any], Fields(DemoOptions, NAMES, OWN)],
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw acceptance and speed.")] = None,
) -> None:
    """Compare plain decoding, n-grams and a trained head on real weights."""
    chosen = DemoOptions(**options)
    from jaxspec.demo.run import demo

    demo(chosen, as_json=as_json, plot=plot)

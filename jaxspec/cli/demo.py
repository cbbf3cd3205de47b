"""jaxspec demo"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.shared import DRAFT, AsJson, Dtype
from jaxspec.config import EngineConfig


def demo(
    max_tokens: Annotated[int, typer.Option(help="Longest answer to each prompt, in tokens.")] = 64,
    draft: Annotated[str, typer.Option(help="The draft; the trained one comes with jaxspec.")] = DRAFT,
    dtype: Dtype = EngineConfig.dtype,
    compare_transformers: Annotated[
        bool, typer.Option("--compare-transformers", help="Answer with transformers too (needs torch).")
    ] = False,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw acceptance and speed.")] = None,
) -> None:
    """Real weights: plain decoding, n-grams and a draft model side by side."""
    from jaxspec.demo.run import Options, demo

    options = Options(max_tokens=max_tokens, draft=draft, dtype=dtype, compare_transformers=compare_transformers)
    demo(options, as_json=as_json, plot=plot)

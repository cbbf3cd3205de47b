"""jaxspec bench-serve"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from jaxspec.bench.bench_options import listed
from jaxspec.cli.fields import CommandOption, Fields
from jaxspec.cli.shared import AsJson, extra
from jaxspec.common.errors import shortened
from jaxspec.common.progress import write_line
from jaxspec.server.load import PERCENTILES, LoadOptions

OWN = {"concurrency": CommandOption(kind=str)}


def bench_serve(
    url: Annotated[str, typer.Argument(help="Of OpenAI's API, such as http://127.0.0.1:8000/v1.", show_default=False)],
    *,
    load: Annotated[dict[str, Any], Fields(LoadOptions, tuple(f.name for f in dataclasses.fields(LoadOptions)), OWN)],
    as_json: AsJson = False,
) -> None:
    """Put load on a server: its throughput, and what its clients wait for."""
    load["concurrency"] = listed("--concurrency", load["concurrency"], int, 1)
    chosen = LoadOptions(**load)
    with extra("serve"):
        import openai  # noqa: F401
    from jaxspec.server.load import measured

    document = measured(url, chosen)
    if as_json:
        print(json.dumps(document))
        return
    from rich.console import Console

    from jaxspec.bench.report import table

    quantities = ("ttft_ms", "tpot_ms")
    heads = [f"{name.removesuffix('_ms').upper()} p{p}" for name in quantities for p in PERCENTILES]
    shown = table("clients", "requests", "failed", "tokens/s", *heads, title=f"{document['model']}, times in ms")
    for row in document["rows"]:
        times = [row[name][f"p{p}"] for name in quantities for p in PERCENTILES]
        counts = [str(row[name]) for name in ("concurrency", "requests", "failed")]
        speed = f"{row['tokens_per_second']:,.1f}"
        shown.add_row(*counts, speed, *("" if ms is None else f"{ms:,.1f}" for ms in times))
        if row["failed"]:
            first = shortened(row["first_failure"], 200)
            write_line(f"{row['failed']} of {row['failed'] + row['requests']} requests failed: {first}")
    Console().print(shown)

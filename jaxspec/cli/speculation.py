"""The options of speculation, which every command has that generates."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any

import typer

from jaxspec.cli.fields import Fields, flag_of, spoken
from jaxspec.cli.shared import OWN
from jaxspec.common import embedded
from jaxspec.common.errors import UserError, quoted
from jaxspec.drafters import methods
from jaxspec.options.speculative import SpeculativeConfig

Method = enum.StrEnum("Method", {name: name for name in (*methods.NAMES, "none")})  # type: ignore[misc]
DRAFTED = ("num_speculative_tokens", "draft_tensor_parallel_size")


def from_json(text: str) -> SpeculativeConfig:
    """The value of --speculative-config. Raises typer.BadParameter."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise UserError('it must be an object, such as \'{"method": "ngram"}\'')
        return SpeculativeConfig(**found)
    except UserError as error:
        raise typer.BadParameter(f"{quoted(text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{quoted(text)} is no JSON: {error}") from None


Draft = Annotated[
    str | None,
    typer.Option(help="The model or head that drafts, made for this target. The embedded model has one."),
]
Speculates = Annotated[
    Method | None,
    typer.Option(help="Default: as --draft needs; without one ngram, and the embedded pair's head after it."),
]
Drafts = Annotated[dict[str, Any], Fields(SpeculativeConfig, DRAFTED, OWN)]
Json = Annotated[
    SpeculativeConfig | None,
    typer.Option(
        "--speculative-config", parser=from_json, metavar="JSON", help="All options of speculation, as vLLM's object."
    ),
]


def speculation(
    model: str,
    method: Method | None,
    draft: str | None,
    others: dict[str, Any],
    config: SpeculativeConfig | None = None,
) -> SpeculativeConfig | None:
    """Return the speculation that the options ask for, None for plain decoding. Where they ask for nothing it is prompt
    lookup, with the trained head of a model that has one.

    others: the options of DRAFTED; config: all of --speculative-config.
    """
    from checkpoints.sources import DRAFTS

    given = {"method": method, "draft": draft, **others}
    listed = " and ".join(flag_of(name) for name, value in given.items() if value is not None and value != "none")
    if config is not None:
        if listed or method:
            raise UserError(f"--speculative-config says all of speculation: leave {listed or '--method'} out")
        return config
    if method == "none":
        if listed:
            raise UserError(f"--method none decodes plainly: leave {listed} out")
        return None
    if (k := others.get("num_speculative_tokens", 1)) < 1:
        raise UserError(f"{flag_of('num_speculative_tokens')} {k} drafts nothing: --method none decodes plainly")
    needs_draft = method is None or methods.METHODS[methods.split(str(method))[1]].parameters is not None
    if draft is None and needs_draft and model in DRAFTS:
        draft, method = DRAFTS[model], method or Method(embedded.METHOD)
    with spoken({"model": ("--draft",)}):
        return SpeculativeConfig(method=None if method is None else str(method), model=draft, **others)

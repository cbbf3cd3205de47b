"""The options of speculation, for the commands `generate` and `serve`."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any

import typer

from jaxspec.cli.fields import Fields, in_flag_terms
from jaxspec.cli.shared import OWN
from jaxspec.common import embedded
from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag_of
from jaxspec.drafters import methods
from jaxspec.options.speculative import SpeculativeConfig

Method = enum.StrEnum("Method", {name: name for name in (*methods.NAMES, "none")})  # type: ignore[misc]
DRAFT_FIELDS = ("num_speculative_tokens", "draft_tensor_parallel_size")


def from_json(text: str) -> SpeculativeConfig:
    """Parse the value of --speculative-config, a JSON object. Raises: typer.BadParameter if it is wrong."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise UserError('it must be an object, such as \'{"method": "ngram"}\'')
        return SpeculativeConfig(**found)
    except UserError as error:
        raise typer.BadParameter(f"{quoted(text)}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{quoted(text)} is not JSON: {error}") from None


DraftOption = Annotated[
    str | None,
    typer.Option(help="The model or head that drafts, made for this target. The embedded model has one."),
]
MethodOption = Annotated[
    Method | None,
    typer.Option(help="Default: the draft's own; without --draft ngram, followed by the embedded model's head."),
]
DraftOptions = Annotated[dict[str, Any], Fields(SpeculativeConfig, DRAFT_FIELDS, OWN)]
ConfigOption = Annotated[
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
    """Return the speculative config that the options ask for, or None for plain decoding.

    Without a method and a draft it is prompt lookup, followed by the model's trained head if jaxspec comes with one.

    others: values of the fields DRAFT_FIELDS.
    config: value of --speculative-config, which excludes all other options of speculation.
    """
    from checkpoints.sources import DRAFTS

    given = {"method": method, "draft": draft, **others}
    listed = " and ".join(flag_of(name) for name, value in given.items() if value is not None and value != "none")
    if config is not None:
        if listed or method:
            raise UserError(f"--speculative-config holds all options of speculation: leave {listed or '--method'} out")
        return config
    if method == "none":
        if listed:
            raise UserError(f"--method none turns speculation off: leave {listed} out")
        return None
    k = others.get("num_speculative_tokens", 1)
    if k < 1:
        raise UserError(f"{flag_of('num_speculative_tokens')} {k} drafts nothing: use --method none")
    if method is None:
        takes_draft = True
    else:
        _, name = methods.split(str(method))
        takes_draft = methods.METHODS[name].parameters is not None
    if draft is None and takes_draft and model in DRAFTS:
        draft = DRAFTS[model]
        method = method or Method(embedded.METHOD)
    with in_flag_terms({"model": ("--draft",)}):
        return SpeculativeConfig(method=None if method is None else str(method), model=draft, **others)

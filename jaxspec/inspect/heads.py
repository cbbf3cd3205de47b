"""Description of a draft head, as its checkpoint was understood."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.reading import Reading


def understood(reading: Reading) -> dict[str, Any]:
    """Return a description of a draft head, as it was read from its checkpoint.

    Some keys of the result, beside the fields that only the configuration of the head's method has:
      layers_read: indices of the target's layers whose input the head reads; the number of layers L denotes the input
        of the final norm. The list is empty for a head that reads the output of the final norm.
      max_drafts: largest number of draft tokens a round, or None if the head sets no limit.
    """
    c = reading.config
    spec = draft_spec(c)
    declared = {name.rpartition(".")[2] for name in parameters(c, "float32")}
    known = {field.name for field in dataclasses.fields(ModelConfig)} | {"taps", "has_table", "has_head"}
    own = {field.name: getattr(c, field.name) for field in dataclasses.fields(c) if field.name not in known}
    return {
        "method": spec.method,
        "layers_read": list(spec.taps),
        "proposes": c.head_size,
        "max_drafts": spec.max_drafts,
        "mask_id": c.mask_id,
        "own_table": "embed" in declared,
        "own_head": "head" in declared,
        **own,
        "remark": reading.remark or None,
    }


def head_text(head: Mapping[str, Any]) -> str:
    """Return the description of a draft head (by `understood`) as one line of text."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "none" if value is None else str(value)

    return ", ".join(f"{name.replace('_', ' ')}: {word(value)}" for name, value in head.items())

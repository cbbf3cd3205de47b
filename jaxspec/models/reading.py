"""How the checkpoint of a head is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Place


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a checkpoint is read: its configuration, and where its tensors go.

    ignored: shell patterns of those that are part of something else.
    copies: tensor -> the parameter of the target, and which part of it, that stands in its place: see `Found.copies`.
    repeats: tensor -> the one of the same checkpoint that stands in its place, since `tie_weights` says so.
    ones: those of norms that the head does not have.
    rest: those of the model in whose checkpoint the head stands, which should be the target.
    absolute_ids: a reduced vocabulary's ids are written as they are, not as differences from its own.
    norm_plus_one: norms are written as what is added to 1.
    remark: what is left out of it, if anything is that somebody may miss.
    """

    config: ModelConfig
    names: Mapping[str, Place]
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, Place] = dataclasses.field(default_factory=dict)
    repeats: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ones: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    absolute_ids: bool = False
    norm_plus_one: bool = False
    remark: str = ""

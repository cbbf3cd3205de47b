"""Reading: the configuration of a head's checkpoint and the places of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Place


@dataclasses.dataclass(frozen=True)
class Reading:
    """The configuration of a head's checkpoint and the places of its tensors.

    names: places of the tensors, by name.
    ignored: shell patterns of tensors that are not read.
    copies: tensors that copy a parameter of the target, with the parameter and part that replace them (`Found.copies`).
    repeats: tensors that repeat another tensor of the checkpoint, as its option tie_weights says, with that tensor.
    ones: weights of norms that the head lacks; if a file holds them, all must be 1.
    rest: tensors of the model whose checkpoint contains the head; that model should be the target.
    absolute_ids: whether d2t holds the target's ids themselves and not their differences from the draft's ids.
    norm_plus_one: whether the checkpoint stores w for norms that multiply by 1 + w.
    remark: warning about parts of the checkpoint that are not used; empty for none.
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

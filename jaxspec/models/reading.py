"""Reading: the configuration in a drafting head's checkpoint, and the parameters that its tensors fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Place


@dataclasses.dataclass(frozen=True)
class Reading:
    """The configuration in a drafting head's checkpoint, and the parameters that its tensors fill.

    names: (parameter, part) of the head that each tensor fills, by tensor name.
    ignored: shell patterns of tensors that are not read.
    copies: (parameter, part) of the target that replaces each tensor that copies it, by tensor name.
    repeats: for each tensor that repeats another tensor of the checkpoint, as the option tie_weights of its config.json
      says, the name of the other tensor.
    ones: names of tensors of norms that the head's method does not have; if the checkpoint holds such a tensor, all its
      values must be 1.
    rest: names of tensors of a whole model whose checkpoint contains the head; that model should be the target.
    absolute_ids: whether the tensor d2t (draft to target ids) holds target ids, not differences from draft ids.
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

"""DraftSpec: the properties of a model as a draft of its target."""

from __future__ import annotations

import abc
import dataclasses

from jaxspec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class DraftSpec:
    """Properties of a model as a draft of its target.

    method: a name of `jaxspec.drafters.methods`.
    features_width: M, the size of the features of one target position; 0 for a draft that reads no features.
    taps: layers of the target whose inputs become features; L names the input of the last norm.
    features_from: parameters that compute the features, once per position; the draft's own passes do not read them.
    uses_target_head: whether the target's head computes the draft's logits.
    max_drafts: largest number of draft tokens per round; None for no limit.
    """

    method: str = "draft_model"
    features_width: int = 0
    taps: tuple[int, ...] = ()
    features_from: tuple[str, ...] = ()
    uses_target_head: bool = False
    max_drafts: int | None = None


@dataclasses.dataclass(frozen=True)
class HeadConfig(ModelConfig, abc.ABC):
    """The architecture of a drafting head, which is not a complete decoder. Each kind of head derives a class."""

    @property
    @abc.abstractmethod
    def spec(self) -> DraftSpec:
        """Properties of the head as a draft."""


def draft_spec(config: ModelConfig) -> DraftSpec:
    """Return the properties of a model as a draft. Those of a decoder are the defaults: it is a draft model."""
    return config.spec if isinstance(config, HeadConfig) else DraftSpec()

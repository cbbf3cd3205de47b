"""DraftSpec: the properties of a model when it is used as the draft of a target."""

from __future__ import annotations

import abc
import dataclasses

from jaxspec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class DraftSpec:
    """Properties of a model when it is used as the draft of a target.

    Features are numbers that the draft reads for each position, computed from hidden states of the target.

    method: name of the drafting method (`jaxspec.drafters.methods`).
    features_width: M, the number of features of a position; 0 for a draft that reads no features.
    taps: indices of the target's layers whose inputs the features are computed from; the number of layers, L, stands
      for the input of the last norm.
    features_from: names of parameters that compute the features, once per position; the draft's passes do not read
      these parameters.
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
    """The architecture of a drafting head, which is not a complete decoder. Each drafting method derives a class."""

    @property
    @abc.abstractmethod
    def spec(self) -> DraftSpec:
        """Properties of the head when it is used as a draft."""


def draft_spec(config: ModelConfig) -> DraftSpec:
    """Return the properties of a model used as a draft. A complete decoder, used as a draft model, has the defaults."""
    return config.spec if isinstance(config, HeadConfig) else DraftSpec()

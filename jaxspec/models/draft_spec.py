"""DraftSpec: how a model drafts beside its target."""

from __future__ import annotations

import abc
import dataclasses

from jaxspec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class DraftSpec:
    """How a model drafts beside its target.

    method: a name of `jaxspec.drafters.methods`.
    features_width: M, the numbers that it keeps of each of the target's positions; 0 where it reads none of them.
    taps: the target's layers whose input becomes features; L names the input of the last norm.
    features_from: the parameters that compute the features, once a position; a pass reads the others.
    borrows_head: whether its logits are computed by the target's head.
    max_drafts: the most drafts that it proposes a round; None where nothing limits them.
    """

    method: str = "draft_model"
    features_width: int = 0
    taps: tuple[int, ...] = ()
    features_from: tuple[str, ...] = ()
    borrows_head: bool = False
    max_drafts: int | None = None


@dataclasses.dataclass(frozen=True)
class HeadConfig(ModelConfig, abc.ABC):
    """The architecture of a drafting head, which is no decoder by itself. Derived classes say how it drafts."""

    @property
    @abc.abstractmethod
    def spec(self) -> DraftSpec:
        """How it drafts."""


def draft_spec(config: ModelConfig) -> DraftSpec:
    """Return how a model drafts. A decoder is a draft model."""
    return config.spec if isinstance(config, HeadConfig) else DraftSpec()

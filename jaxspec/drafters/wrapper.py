"""The base class of drafters that wrap another drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.base import Chunk, Drafter, ModelParams


class Wrapper(Drafter):
    """A drafter that wraps another drafter, `draft`, and needs the same KV cache, features and context length."""

    draft: Drafter

    @property
    def backend(self) -> Any:
        return self.draft.backend

    @property
    def max_model_len(self) -> int | None:
        return self.draft.max_model_len

    @property
    def max_lag(self) -> int | None:
        return self.draft.max_lag

    @property
    def reach(self) -> int:
        return self.draft.reach

    @property
    def lookahead(self) -> int:
        return self.draft.lookahead

    @property
    def passes(self) -> float:
        return self.draft.passes

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.taps

    @property
    def features_width(self) -> int:
        return self.draft.features_width

    def features(
        self, params: ModelParams, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]]
    ) -> Float[Array, "B T M"]:
        return self.draft.features(params, hidden, tapped)

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        return self.draft.prefill(params, cache, chunk)

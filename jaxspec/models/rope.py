"""Rope: the frequencies of a rotary position embedding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding with frequencies theta^(-2i/D) / factors[i] for heads of size D. Empty factors are all 1.

    rotated: number of the first frequencies that are used; the others are 0, which rotates nothing. None for all.
    scale: factor of the elements of queries and keys that are rotated.
    context: number of positions up to which `factors` apply and queries do not grow; None for all positions.
    long_factors: factors in place of `factors` if max_model_len exceeds `context`; empty if they are the same.
    query_growth: b in the factor 1 + b * log(1 + floor(p / context)) of queries at position p.
    """

    theta: float = 10000.0
    factors: tuple[float, ...] = ()
    rotated: int | None = None
    scale: float = 1.0
    context: int | None = None
    long_factors: tuple[float, ...] = ()
    query_growth: float = 0.0

    def frequencies(self, head_dim: int) -> np.ndarray[Any, Any]:
        """Return the D/2 frequencies for heads of size D = head_dim."""
        found = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.factors:
            found = found / np.asarray(self.factors)
        if self.rotated is not None:
            found[self.rotated :] = 0.0
        return found

    def within(self, max_model_len: int) -> Rope:
        """Return the embedding for texts of up to max_model_len positions: with one list of factors.

        The choice holds for all texts of a model, because cached keys are reused between texts.
        """
        if self.context is None or max_model_len <= self.context:
            return dataclasses.replace(self, context=None, long_factors=(), query_growth=0.0)
        context = self.context if self.query_growth else None
        return dataclasses.replace(self, factors=self.long_factors or self.factors, context=context, long_factors=())


PLAIN_ROPE = Rope()
NO_ROPE = Rope(rotated=0)  # of layers that do not see positions

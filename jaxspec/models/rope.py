"""Rope: the frequencies of a rotary position embedding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding with frequencies theta^(-2i/D) / factors[i] for heads of size D. Empty factors are all 1.

    rotated: number of the first frequencies that are used; the others are 0, which rotates nothing. None for all.
    """

    theta: float = 10000.0
    factors: tuple[float, ...] = ()
    rotated: int | None = None

    def frequencies(self, head_dim: int) -> np.ndarray[Any, Any]:
        """Return the D/2 frequencies for heads of size D = head_dim."""
        found = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.factors:
            found = found / np.asarray(self.factors)
        if self.rotated is not None:
            found[self.rotated :] = 0.0
        return found


PLAIN_ROPE = Rope()

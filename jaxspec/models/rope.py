"""Rope: the frequencies of a rotary position embedding."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding with frequencies theta^(-2i/D) / factors[i] for heads of size D. Empty factors are all 1."""

    theta: float = 10000.0
    factors: tuple[float, ...] = ()


PLAIN_ROPE = Rope()

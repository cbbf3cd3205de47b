"""Frequencies of the rotary embedding."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: frequencies theta^(-2i/D), each divided by factors[i] (all 1 where factors is empty)."""

    theta: float = 10000.0
    factors: tuple[float, ...] = ()


PLAIN_ROPE = Rope()

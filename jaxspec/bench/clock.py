"""Timing of calls that wait for the device: the median, the quartiles and the minimum over several runs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Sample:
    """Times of several runs, in milliseconds: median (ms), lower and upper quartile (low, high), minimum (best)."""

    ms: float
    low: float
    high: float
    best: float

    def __truediv__(self, parts: float) -> Sample:
        return Sample(self.ms / parts, self.low / parts, self.high / parts, self.best / parts)


def summary(ms: Sequence[float]) -> Sample:
    """Return the median, quartiles and minimum of one or more times in milliseconds."""
    if len(ms) == 1:
        return Sample(ms[0], ms[0], ms[0], ms[0])
    low, middle, high = statistics.quantiles(ms, n=4, method="inclusive")
    return Sample(middle, low, high, min(ms))


def measure(call: Callable[[], Any], launches: int, *, warm_up: int = 2) -> Sample:
    """Return the times of `launches` calls of the function `call`, each until the result is computed.

    warm_up: number of untimed calls before these. The first of them may compile.
    """
    for _ in range(warm_up):
        jax.block_until_ready(call())
    spent = []
    for _ in range(launches):
        started = time.perf_counter()
        jax.block_until_ready(call())
        spent.append((time.perf_counter() - started) * 1e3)
    return summary(spent)

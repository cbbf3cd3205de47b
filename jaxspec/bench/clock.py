"""Timing by synchronisation: warm up, run several times, tell the median, the quartiles and the best."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Sample:
    """Milliseconds: the median, the lower and the upper quartile, the least."""

    ms: float
    low: float
    high: float
    best: float

    def __truediv__(self, parts: float) -> Sample:
        return Sample(self.ms / parts, self.low / parts, self.high / parts, self.best / parts)


def summary(ms: Sequence[float]) -> Sample:
    low, middle, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else [ms[0]] * 3
    return Sample(middle, low, high, min(ms))


def measure(call: Callable[[], Any], launches: int, *, warm_up: int = 2) -> Sample:
    """Milliseconds of one call, device work included: each call's result is waited for. Compile before."""
    for _ in range(warm_up):
        jax.block_until_ready(call())
    spent = []
    for _ in range(launches):
        started = time.perf_counter()
        jax.block_until_ready(call())
        spent.append((time.perf_counter() - started) * 1e3)
    return summary(spent)

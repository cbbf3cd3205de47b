"""Counters of the rounds of one launch (one run of the device program), and a stopwatch for an engine's times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decode.state import LaunchResult
from jaxspec.engine.metrics import SpecDecodeMetrics, Timing
from jaxspec.runtime.programs import Programs


@dataclasses.dataclass
class stopwatch:
    """A context manager that adds its duration to one field of `timing`.

    Time that the context spends compiling is added to timing.compile_seconds instead.

    field: name of the field of `timing`.
    programs: the compiled programs, which count the seconds spent compiling.
    seconds: the duration of the last use, without compiling.
    """

    timing: Timing
    field: str
    programs: Programs
    seconds: float = 0.0

    def __enter__(self) -> stopwatch:
        self.started = time.perf_counter()
        self.compiled = self.programs.compile_seconds
        self.waits = self.programs.num_waits
        return self

    def __exit__(self, *_: Any) -> None:
        compiling = self.programs.compile_seconds - self.compiled
        self.timing.compile_seconds += compiling
        self.timing.num_compiled += self.programs.num_waits - self.waits
        self.seconds = time.perf_counter() - self.started - compiling
        setattr(self.timing, self.field, getattr(self.timing, self.field) + self.seconds)


def counters(result: LaunchResult, kept: Sequence[int]) -> list[SpecDecodeMetrics]:
    """Return the speculative-decoding counters of each row for one launch.

    kept: for each row, the number of the launch's tokens that stay in the output. Tokens after them, which a stop
      string cut off, are not counted. The number is negative if the stop string removed earlier launches' tokens, too.
    """
    rows = len(kept)
    emitted = result.emitted[:rows]
    limit = np.array(kept)[:, None]
    start = np.cumsum(emitted, axis=1) - emitted  # tokens that a row gained before each round
    proposed = np.where(start < limit, result.proposed[:rows], 0)
    accepted = np.minimum(result.accepted[:rows], np.maximum(limit - start, 0))
    position = np.arange(result.num_speculative_tokens)
    columns = (
        np.sum(proposed > 0, axis=1).tolist(),
        np.sum(proposed, axis=1).tolist(),
        np.sum(accepted[:, :, None] > position, axis=1).tolist(),
        kept,
    )
    return [SpecDecodeMetrics(*values) for values in zip(*columns, strict=True)]

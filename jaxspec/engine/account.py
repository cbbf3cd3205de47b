"""Keeping count: what a launch's rounds did, and where the time went."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from jaxspec.decode.programs import Programs
from jaxspec.decode.state import LaunchResult
from jaxspec.outputs import SpecDecodeMetrics, Timing


@dataclasses.dataclass
class stopwatch:
    """Adds the seconds spent inside to a field of timing, compiling apart. seconds: the last time's."""

    timing: Timing
    field: str
    programs: Programs
    seconds: float = 0.0

    def __enter__(self) -> stopwatch:
        self.started, self.compiled = time.perf_counter(), self.programs.compile_seconds
        return self

    def __exit__(self, *_: Any) -> None:
        compiling = self.programs.compile_seconds - self.compiled
        self.timing.compile_seconds += compiling
        self.seconds = time.perf_counter() - self.started - compiling
        setattr(self.timing, self.field, getattr(self.timing, self.field) + self.seconds)


def counters(result: LaunchResult, row: int, kept: int) -> SpecDecodeMetrics:
    """What one row's rounds did, as far as its first `kept` tokens: what a stop string cut off counts for nothing."""
    if not result.num_speculative_tokens:
        return SpecDecodeMetrics(num_emitted_tokens=kept)
    emitted = result.emitted[row]
    start = np.cumsum(emitted) - emitted  # tokens before each round
    proposed = np.where(start < kept, result.proposed[row], 0)
    accepted = np.minimum(result.accepted[row], np.maximum(kept - start, 0))
    position = np.arange(result.num_speculative_tokens)
    return SpecDecodeMetrics(
        num_drafts=int(np.sum(proposed > 0)),
        num_draft_tokens=int(np.sum(proposed)),
        num_accepted_tokens_per_pos=np.sum(accepted[:, None] > position, axis=0).tolist(),
        num_emitted_tokens=kept,
    )

"""Prompts into the caches: by passes of their own, or taken in after they have ridden along in those of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxspec.engine import batch, results
from jaxspec.engine.catalogue import Open
from jaxspec.engine.request import Request
from jaxspec.engine.roster import Roster
from jaxspec.engine.runner import NOTHING, Plan

Timed = Callable[[str], AbstractContextManager[Any]]


@dataclasses.dataclass
class Prefilling:
    """shape: of a pass; lag: how far the draft may be behind; timed: the engine's clock of a field of its timing."""

    roster: Roster
    catalogue: Open
    shape: batch.ChunkShape
    lag: results.Lag
    timed: Timed

    def prefill(self, requests: Sequence[Request], row_pages: int) -> None:
        """One pass: the next tokens of these requests, those of the first first, into both caches."""
        requests = [r for r in requests if r.finish_reason is None and not r.prefilled]
        if not requests:
            return
        rows = batch.pieces(requests, [r.target_len for r in requests], self.shape)
        shape, variant = self.catalogue.prefill("prefill", self.shape, batch.prefill_variant([r for r, *_ in rows]))
        plan = Plan("prefill", (self.chunk(rows, shape, row_pages),), variant=variant)
        with self.timed("prefill_seconds"):
            scores = self.roster.runner.execute(plan)
        self.absorb(rows, scores)

    def absorb(self, rows: Sequence[batch.Piece], scores: Any = None, *, drafted: bool = True) -> None:
        """These pieces are in the caches now, the draft's too where they were drafted."""
        for row, (request, _, length) in enumerate(rows):
            with self.roster.blame([request], device=False):
                if request.finish_reason is None:
                    results.absorb_chunk(request, row, length, scores, self.lag, drafted=drafted)
                    self.roster.scheduler.register(request)

    def catch_up(self, requests: Sequence[Request], row_pages: int) -> None:
        """The draft reads what was decoded without it, but for what its first pass in the loop reads."""
        while behind := [r for r in requests if r.num_speculative_tokens and self.lag.too_far(r)]:
            rows = batch.pieces(behind, [r.draft_len + self.lag.lookahead for r in behind], self.shape)
            shape, variant = self.catalogue.prefill("catch_up", self.shape, NOTHING)
            self.roster.runner.execute(Plan("catch_up", (self.chunk(rows, shape, row_pages),), variant=variant))
            for request, _, length in rows:
                request.draft_len += length

    def chunk(self, rows: Sequence[batch.Piece], shape: batch.ChunkShape, row_pages: int) -> Any:
        return batch.chunk_input(rows, self.roster.runner.decoding.target.layout, shape, row_pages=row_pages)

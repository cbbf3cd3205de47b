"""Prefill passes of the target and of the draft. Each pass reads pieces of several prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxspec.engine import batch, grammar_pool, results
from jaxspec.engine.catalogue import OpenCatalogue, Prefill
from jaxspec.engine.open_requests import OpenRequests
from jaxspec.engine.request import Request
from jaxspec.runtime.plans import NOTHING, Plan

Timed = Callable[[str], AbstractContextManager[Any]]


@dataclasses.dataclass
class Prefilling:
    """The part of the engine that runs prefill passes, which overlap with work of the host.

    The device runs a queued pass while the host packs the next program's arguments. `settle` waits for queued passes.

    catalogue: chooses the compiled program of a pass.
    shape: largest shape of the token array of a pass.
    lag: the distance by which the draft's KV cache may trail the target's.
    timed: function that returns a stopwatch for a field of the engine's `Timing`.
    queued: passes that were started and not waited for yet: (requests of the pass, its result on the device).
    """

    open_requests: OpenRequests
    catalogue: OpenCatalogue
    shape: batch.ChunkShape
    lag: results.Lag
    timed: Timed
    queued: list[tuple[list[Request], Any]] = dataclasses.field(default_factory=list)

    def is_due(self, max_num_seqs: int) -> bool:
        """Return whether a prefill pass over the running requests' prompts should run now.

        If max_num_seqs requests decode already, the prompts can wait until they fill a whole pass.
        """
        scheduler = self.open_requests.scheduler
        unread = [r for r in scheduler.running if not r.prefilled]
        if not unread:
            return False
        has_room = len(scheduler.ready) < max_num_seqs
        return has_room or len(self.pieces(unread)) == self.shape.rows

    def pieces(self, requests: Sequence[Request]) -> list[batch.Piece]:
        return batch.pieces(requests, [r.target_len for r in requests], self.shape)

    def prefill(self, requests: Sequence[Request], row_pages: int, *, drafted: bool) -> None:
        """Run one target pass over the next prompt tokens of these requests, in the order of the requests.

        row_pages: N, the width of the block table.
        drafted: whether the draft reads the same tokens, too.
        """
        requests = [r for r in requests if r.finish_reason is None and not r.prefilled]
        if not requests:
            return
        rows = self.pieces(requests)
        taking_part = list(dict.fromkeys(request for request, *_ in rows))
        with self.open_requests.blame(taking_part):
            program = self.catalogue.prefill("prefill", self.shape, row_pages, batch.prefill_variant(taking_part))
            started = self.queue(taking_part, self.plan(program, rows))
            scores = None if program.variant.logprobs is None else self.open_requests.runner.fetch(started)
        for row, (request, _, length) in enumerate(rows):
            with self.open_requests.blame([request], device=False):
                results.absorb_chunk(request, row, length, scores, self.lag)
        if drafted:
            self.catch_up(taking_part, row_pages)
        for request in taking_part:
            with self.open_requests.blame([request], device=False):
                if request.finish_reason is None:
                    self.open_requests.scheduler.register(request)

    def write_grammars(self, admitted: Sequence[Request]) -> None:
        """Write the tables of these requests' grammars to the device, unless they are there."""
        for automaton, first in self.open_requests.scheduler.grammars.take_unwritten():
            owners = [r for r in admitted if r.automaton and r.automaton.digest == automaton.digest]
            with self.open_requests.blame(owners):
                for plan in grammar_pool.writes(automaton, first):
                    self.queue(owners, plan)

    def copy_pages(self, copies: Sequence[tuple[Request, tuple[int, int]]]) -> None:
        """Copy pages for further samples of a prompt. copies: (request, (source page, target page)) of each copy."""
        layout = self.open_requests.runner.decoding.target.layout
        for at in range(0, len(copies), batch.COPIES):
            owners, pages = zip(*copies[at : at + batch.COPIES], strict=True)
            with self.open_requests.blame(owners):
                self.queue(owners, Plan("copy_pages", batch.copied_pages(pages, layout)))

    def catch_up(self, requests: Sequence[Request], row_pages: int) -> None:
        """Prefill the draft with tokens that only the target has read.

        The last few tokens may be left out: the draft's first pass of the next round reads up to `Lag.most` of them.
        """
        while behind := [r for r in requests if r.num_speculative_tokens and self.lag.too_far(r)]:
            starts = [r.draft_len + self.lag.lookahead for r in behind]
            rows = batch.pieces(behind, starts, self.shape, ends=[r.target_len for r in behind])
            taking_part = [request for request, *_ in rows]
            with self.open_requests.blame(taking_part):
                program = self.catalogue.prefill("catch_up", self.shape, row_pages, NOTHING)
                self.queue(taking_part, self.plan(program, rows))
            for request, _, length in rows:
                request.draft_len += length

    def queue(self, requests: Sequence[Request], plan: Plan) -> Any:
        """Start a plan (a device program and its arguments) for these requests. Return its result on the device."""
        with self.timed("prefill_seconds"):
            started = self.open_requests.runner.start(plan)
        self.queued.append((list(requests), started))
        return started

    def take_ready(self, participants: list[Request]) -> list[Request]:
        """Return the requests that can decode. Those that want no output (max_tokens=0) end instead.

        Requests that end are appended to `participants`.
        """
        ready = self.open_requests.scheduler.ready
        scored = [r for r in ready if r.params.max_tokens == 0]
        if not scored:
            return ready
        self.settle()
        for request in scored:
            request.finish_reason, request.times.finished = "length", time.perf_counter()
            self.open_requests.remove(request)
        participants += scored
        return self.open_requests.scheduler.ready

    def settle(self) -> None:
        """Wait for the queued passes. Record when a prompt is read. If a pass fails, its requests end with an error."""
        while self.queued:
            requests, started = self.queued.pop(0)
            with self.open_requests.blame(requests), self.timed("prefill_seconds"):
                self.open_requests.runner.wait(started)
            now = time.perf_counter()
            for request in requests:
                if request.prefilled:
                    request.times.prefilled = request.times.prefilled or now

    def plan(self, program: Prefill, rows: Sequence[batch.Piece]) -> Plan:
        """Return the plan (program and arguments) of a prefill pass over these pieces of prompts."""
        layout = self.open_requests.runner.decoding.target.layout
        chunk = batch.chunk_input(rows, layout, program.shape, row_pages=program.row_pages)
        return Plan(program.name, (chunk,), variant=program.variant)

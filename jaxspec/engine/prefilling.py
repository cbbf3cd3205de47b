"""Prefill passes of the target and of the draft. Each pass reads pieces of several prompts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxspec.engine import batch, grammar_pool, results
from jaxspec.engine.account import stopwatch
from jaxspec.engine.catalogue import OpenCatalogue, Prefill
from jaxspec.engine.open_requests import OpenRequests, QueuedPass
from jaxspec.engine.request import Request
from jaxspec.runtime.plans import NOTHING, Plan

Timed = Callable[[str], AbstractContextManager[stopwatch]]


@dataclasses.dataclass
class Prefilling:
    """The part of the engine that runs prefill passes, which overlap with work of the host.

    The device runs a queued pass while the host packs the next program's arguments. `settle` waits for queued passes.
    Every pass has short prompts in it, so that none of them waits for a long one (`batch.pieces`).

    catalogue: chooses the compiled program of a pass.
    shape: largest shape of the token array of a pass.
    lag: the distance by which the draft's KV cache may trail the target's.
    timed: function that returns a stopwatch for a field of the engine's `Timing`.
    turn: number of passes so far.
    seconds_of: seconds of the last pass of each size, the draft's part included, by its number of rows.
    settled: when the last pass ended, in seconds of time.perf_counter.
    """

    open_requests: OpenRequests
    catalogue: OpenCatalogue
    shape: batch.ChunkShape
    lag: results.Lag
    timed: Timed
    turn: int = 0
    seconds_of: dict[int, float] = dataclasses.field(default_factory=dict)
    settled: float = 0.0

    def is_due(self, max_num_seqs: int, seconds: float | None = None) -> bool:
        """Return whether to run a prefill pass before the next launch, over prompts of admitted requests.

        If fewer than max_num_seqs requests can decode, prefill is not delayed. If that many can, it is delayed until
        the prompts fill a whole pass. If, in addition, a request that can decode is there for each spare row, prefill
        is delayed until the launch ends, even if the prompts fill a pass.

        seconds: as in `prefill`.
        """
        ready = len(self.open_requests.scheduler.ready)
        if ready < max_num_seqs:
            return bool(self.unread)
        return ready < max_num_seqs + self.catalogue.spare[max_num_seqs] and self.fills_pass(seconds)

    @property
    def unread(self) -> list[Request]:
        """The running requests that have prompt tokens left to read, the oldest first."""
        return [r for r in self.open_requests.scheduler.running if r.finish_reason is None and not r.prefilled]

    def fills_pass(self, seconds: float | None = None) -> bool:
        """Return whether the running requests' prompts fill a whole prefill pass. seconds: as in `prefill`."""
        shape = self.shape_within(seconds)
        return len(self.pieces(self.unread, shape)) == shape.rows

    def follows(self, seconds: float | None, *, streaming: bool) -> bool:
        """Return whether to queue a pass behind the launch that runs. seconds: as in `prefill`.

        While clients stream, this is done only if all rows are taken, so that no request could be admitted before the
        pass. With free rows, a short prompt that arrives while the launch runs would miss the queued pass, and its
        first token would wait for two passes.

        A pass with log-probabilities of prompts is fetched at once, so an error of the launch would seem to be its own.
        """
        scheduler = self.open_requests.scheduler
        if streaming and len(scheduler.running) < scheduler.max_num_seqs:
            return False
        return self.fills_pass(seconds) and not any(r.wants_prompt_logprobs for r in self.unread)

    def waited(self, seconds: float) -> None:
        """Leave out of the queued passes' durations these seconds, in which a launch before them ran."""
        queued = self.open_requests.queued
        queued[:] = [earlier._replace(started=earlier.started + seconds) for earlier in queued]

    def pieces(self, requests: Sequence[Request], shape: batch.ChunkShape) -> list[batch.Piece]:
        return batch.pieces(requests, [r.target_len for r in requests], shape, turn=self.turn)

    def pass_seconds(self, max_gap_ms: float | None, launch_seconds: float) -> float | None:
        """Return the limit in seconds of a prefill pass while clients stream, None for no limit.

        It is what a launch leaves of max_gap_ms, but at least as long as a launch, so that prompts are also read if a
        launch alone exceeds max_gap_ms.
        """
        if max_gap_ms is None or len(self.open_requests.scheduler.running) < 2:
            return None  # with one running request, no other waits for its prompt
        return max(max_gap_ms / 1000 - launch_seconds, launch_seconds)

    def shape_within(self, seconds: float | None) -> batch.ChunkShape:
        """Return the largest shape of a pass that took at most these seconds. The smallest one is always allowed.

        A size that was not measured yet is tried if the next smaller one took at most half of them.
        """
        if seconds is None:
            return self.shape
        sizes = self.catalogue.pass_rows(self.shape)
        chosen = sizes[0]
        for smaller, rows in itertools.pairwise(sizes):
            tried = self.seconds_of.get(rows)
            if tried is None and self.seconds_of.get(smaller, math.inf) <= seconds / 2:
                return dataclasses.replace(self.shape, rows=rows)
            chosen = rows if tried is not None and tried <= seconds else chosen
        return dataclasses.replace(self.shape, rows=chosen)

    def prefill(self, row_pages: int, *, drafted: bool, seconds: float | None = None) -> None:
        """Run one target pass over the next tokens of the running requests' prompts.

        row_pages: N, the width of the block table.
        drafted: whether the draft reads the same tokens, too.
        seconds: limit of the pass's duration; None for none. A pass with log-probabilities of prompts has its full
          size whatever it takes, because only that size has a program.
        """
        requests = self.unread
        if not requests:
            return
        scored = any(r.wants_prompt_logprobs for r in requests)
        rows = self.pieces(requests, self.shape_within(None if scored else seconds))
        self.turn += 1
        taking_part = list(dict.fromkeys(request for request, *_ in rows))
        self.open_requests.scheduler.cover([(request, start + length) for request, start, length in rows])
        with self.open_requests.blame(taking_part):
            program = self.catalogue.prefill("prefill", self.shape, row_pages, batch.prefill_variant(taking_part))
            started = self.queue(taking_part, self.plan(program, rows), rows=program.shape.padded(len(rows)))
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

    def copy_pages(self, copies: Sequence[tuple[Request, tuple[int, ...]]]) -> None:
        """Copy pages for further samples of a prompt. copies: as `Scheduler.admit` returns them."""
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

    def queue(self, requests: Sequence[Request], plan: Plan, *, rows: int = 0) -> Any:
        """Start a plan (a device program and its arguments) for these requests. Return its result on the device.

        rows: as in `QueuedPass`.
        """
        with self.timed("prefill_seconds") as watch:
            result = self.open_requests.runner.start(plan)
        started = time.perf_counter() - watch.seconds  # without the time that the program was compiled in
        self.open_requests.queued.append(QueuedPass(list(requests), result, started, rows))
        return result

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

    def settle(self, count: int | None = None) -> None:
        """Wait for the queued passes. Record when a prompt is read. If a pass fails, its requests end with an error.

        count: number of passes to wait for, the oldest first; None for all.
        """
        queued = self.open_requests.queued
        sizes, seconds = [], 0.0
        for _ in range(len(queued) if count is None else count):
            requests, result, started, rows = queued.pop(0)
            with self.open_requests.blame(requests), self.timed("prefill_seconds"):
                self.open_requests.runner.wait(result)
            now = time.perf_counter()
            sizes += [rows] * (rows > 0)
            seconds += now - max(started, self.settled)
            self.settled = now
            to_be_read = {request.id for later in queued if later.rows for request in later.requests}
            for request in requests:
                if request.prefilled and request.id not in to_be_read:
                    request.times.prefilled = request.times.prefilled or now
        if len(sizes) == 1:
            self.seconds_of[sizes[0]] = seconds

    def plan(self, program: Prefill, rows: Sequence[batch.Piece]) -> Plan:
        """Return the plan (program and arguments) of a prefill pass over these pieces of prompts."""
        layout = self.open_requests.runner.decoding.target.layout
        chunk = batch.chunk_input(rows, layout, program.shape, row_pages=program.row_pages)
        return Plan(program.name, (chunk,), variant=program.variant)

"""Who is here: the engine's requests from when they come to when they leave, whatever goes wrong in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from jaxspec.common.errors import said
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler


class CachesLost(Exception):
    """A program failed on the device, so that what the caches hold is unknown. It ends a step: all requests wait, and
    are computed again."""


class Roster:
    """An error ends the requests that it hit. An interrupt ends nobody: it may come anywhere, and the next step begins
    again with what is known to be whole."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.open: dict[int, Request] = {}  # by id: what has not left yet, wherever it is
        self.failed: list[Request] = []  # in this step, or ended in one that was interrupted
        self.midway = False  # in a change that, interrupted, leaves queues, pages and caches in no known state
        self.inside = False  # ... which is under way: who is called within, by the garbage collector, changes nothing

    def add(self, requests: Sequence[Request]) -> None:
        with self.whole():
            for request in requests:
                self.scheduler.add(request)
            self.open.update({request.id: request for request in requests})

    def abort(self, request: Request) -> None:
        """Ends a request, where it has not ended, and frees its pages."""
        if request.finish_reason is None:
            request.finish_reason, request.times.finished = "abort", time.perf_counter()
        if request.id not in self.open or self.inside:  # a step lets go of what has ended
            return
        if self.midway:
            self.begin_again()
        else:
            with self.whole():
                self.let_go(request)

    def let_go(self, request: Request) -> None:
        """Of one that has ended; where the engine did not end it, as where its text cannot be read, it is told of."""
        if request.finish_reason == "error" and request not in self.failed:
            self.failed.append(request)
        self.leave(request)

    def let_go_of_ended(self) -> None:
        for request in [r for r in self.open.values() if r.finish_reason]:
            self.let_go(request)

    def leave(self, request: Request) -> None:
        self.open.pop(request.id, None)
        self.scheduler.remove(request)

    def leave_ended(self) -> list[Request]:
        """Lets go of what has ended, by whatever; those that failed."""
        self.let_go_of_ended()
        failed, self.failed = self.failed, []
        return failed

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The engine's step is done inside. Where the last one did not come to its end, all pages are computed anew.
        What ended since is let go of first: nobody waits for a row of it."""
        self.inside = False  # an interrupt may have come where that was to be set
        if self.midway or self.runner.lost:
            self.begin_again()
        with self.whole():
            self.let_go_of_ended()
            yield

    @contextlib.contextmanager
    def blame(self, requests: Sequence[Request], *, device: bool = True) -> Iterator[None]:
        """End these requests with an error that says why where something goes wrong inside; the others go on.

        device: it may go wrong on the device. Raises: CachesLost where it did.
        """
        try:
            yield
        except CachesLost:  # others' trouble, which somebody inside has blamed
            raise
        except Exception as error:
            for request in requests:
                if request.finish_reason is None:
                    request.error, request.finish_reason = said(error), "error"
                    request.times.finished = time.perf_counter()
                    self.leave(request)
                    self.failed.append(request)
            if device:
                raise CachesLost from error

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What is done inside is done wholly, or undone by `begin_again`."""
        outer = self.midway, self.inside
        try:
            self.midway = self.inside = True
            yield
            self.midway = outer[0]
        finally:
            self.inside = outer[1]

    def begin_again(self) -> None:
        """After an interrupt: queues, pages and caches may be in any state, tokens are whole."""
        self.lose_caches()
        self.midway = False

    def lose_caches(self) -> None:
        """Empty pages, and all requests wait: what they have said stays, and is computed again."""
        ended = [r for r in self.open.values() if r.finish_reason]
        self.failed += [r for r in ended if r not in self.failed]
        for request in ended:
            request.lose_pages()
            self.open.pop(request.id, None)
        self.scheduler.reset(self.open.values())
        self.runner.renew()

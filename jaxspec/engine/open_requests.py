"""The open requests, from when they are added until they are removed, and recovery from errors and interrupts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from jaxspec.common.errors import error_line
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler


class CachesLost(Exception):
    """The failure of a program on the device, after which the contents of the caches are unknown. It ends the step: all
    requests wait again, and are recomputed."""


class OpenRequests:
    """The engine's open requests. An error ends the requests that it concerns. An interrupt ends none: it may come at
    any point, and the next step starts again from the requests' tokens, which are always complete."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.open: dict[int, Request] = {}  # by id: every request that was not removed yet
        self.failed: list[Request] = []  # those that failed in this step, or in an interrupted one
        self.midway = False  # whether a change has begun that leaves queues, pages and caches undefined if interrupted
        self.inside = False  # whether that change is running: calls from within, by garbage collection, do nothing

    def add(self, requests: Sequence[Request]) -> None:
        """Queue these requests."""
        with self.change():
            for request in requests:
                self.scheduler.add(request)
            self.open.update({request.id: request for request in requests})

    def abort(self, request: Request) -> None:
        """End a request that has not ended, and free its pages."""
        if request.finish_reason is None:
            request.finish_reason, request.times.finished = "abort", time.perf_counter()
        if request.id not in self.open or self.inside:  # removed already, or released by the step under way
            return
        if self.midway:
            self.recover()
        else:
            with self.change():
                self.release(request)

    def release(self, request: Request) -> None:
        """Release a finished request. Report it if it failed outside the engine, for example in its tokenizer."""
        if request.finish_reason == "error" and request not in self.failed:
            self.failed.append(request)
        self.remove(request)

    def release_ended(self) -> None:
        """Release all finished requests."""
        for request in [r for r in self.open.values() if r.finish_reason]:
            self.release(request)

    def remove(self, request: Request) -> None:
        """Remove a request, and free its pages."""
        self.open.pop(request.id, None)
        self.scheduler.remove(request)

    def take_failed(self) -> list[Request]:
        """Release all finished requests. Return those that failed since the last call."""
        self.release_ended()
        failed, self.failed = self.failed, []
        return failed

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of one step of the engine. If the last step was interrupted, all pages are recomputed.
        Requests that have ended since are released first, so that none of them holds a row."""
        self.inside = False  # an interrupt may have come before this was reset
        if self.midway or self.runner.lost:
            self.recover()
        with self.change():
            self.release_ended()
            yield

    @contextlib.contextmanager
    def blame(self, requests: Sequence[Request], *, device: bool = True) -> Iterator[None]:
        """Return a context in which an error ends these requests, with its reason; other requests go on.

        device: whether the error may come from the device. Raises: CachesLost if it may.
        """
        try:
            yield
        except CachesLost:  # an inner `blame` has ended the requests concerned
            raise
        except Exception as error:
            for request in requests:
                if request.finish_reason is None:
                    request.error, request.finish_reason = error_line(error), "error"
                    request.times.finished = time.perf_counter()
                    self.remove(request)
                    self.failed.append(request)
            if device:
                raise CachesLost from error

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Return the context of a change that is either completed, or undone by `recover` after an interrupt."""
        outer = self.midway, self.inside
        try:
            self.midway = self.inside = True
            yield
            self.midway = outer[0]
        finally:
            self.inside = outer[1]

    def recover(self) -> None:
        """Recover from an interrupt. Queues, pages and caches may be in any state; requests' tokens are complete."""
        self.lose_caches()
        self.midway = False

    def lose_caches(self) -> None:
        """Empty the caches and let all requests wait again. Their output is kept and recomputed."""
        ended = [r for r in self.open.values() if r.finish_reason]
        self.failed += [r for r in ended if r not in self.failed]
        for request in ended:
            request.lose_pages()
            self.open.pop(request.id, None)
        self.scheduler.reset(self.open.values())
        self.runner.renew()

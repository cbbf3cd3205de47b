"""The engine's open requests (added and not yet removed), and their recovery from errors and interrupts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxspec.common.errors import error_line
from jaxspec.decode.state import NOT_FINITE
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler
from jaxspec.parallel.mailbox import LOST

logger = logging.getLogger(__name__)


class CachesLost(Exception):
    """An error while a device program was queued or run, after which the contents of the KV caches are unknown.

    The program's own requests have ended with the error, if it is theirs. The exception ends the engine's step. All
    other open requests then wait again, and their keys and values are recomputed.
    """


class QueuedPass(NamedTuple):
    """A pass that runs on the device while the host goes on.

    requests: requests of the pass.
    result: its result on the device.
    started: when it was started, in seconds of time.perf_counter.
    rows: number of its rows of prompt tokens; 0 if the target reads no prompt in it.
    """

    requests: list[Request]
    result: Any
    started: float
    rows: int


class OpenRequests:
    """The engine's open requests. An error ends only the requests that it concerns, an interrupt ends none.

    An interrupt (such as KeyboardInterrupt) may come at any point. Each request's list of tokens is always consistent,
    so that the engine's next step can recompute everything else from it.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.open: dict[int, Request] = {}  # all requests that were not removed yet, by id
        self.queued: list[QueuedPass] = []  # passes that were started and not waited for yet, the oldest first
        # Requests since the last `take_failed` that failed, or that had ended when the caches were lost.
        self.failed: list[Request] = []
        self.sums_lost = False  # whether sums over two GPUs were lost in the last launch
        self.midway = False  # whether a `change` has begun and not ended, so that queues and pages may be inconsistent
        self.inside = False  # whether a `change` is running now; garbage collection may call `abort` during it

    def add(self, requests: Sequence[Request]) -> None:
        """Add these requests to the scheduler's queue."""
        with self.change():
            for request in requests:
                self.scheduler.add(request)
            self.open.update({request.id: request for request in requests})

    def abort(self, request: Request) -> None:
        """End a request with finish reason "abort" if it has not ended, and free its pages."""
        if request.finish_reason is None:
            request.finish_reason, request.times.finished = "abort", time.perf_counter()
        if request.id not in self.open or self.inside:  # removed already, or the running step will release it
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
        """Remove a request from the open requests and from the scheduler, and free its pages."""
        self.open.pop(request.id, None)
        self.scheduler.remove(request)

    def take_failed(self) -> list[Request]:
        """Release all finished requests. Return the requests in `failed`, and empty that list."""
        self.release_ended()
        failed, self.failed = self.failed, []
        return failed

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of one step of the engine.

        If the last step was interrupted, or the caches are lost, the contents of all pages are dropped and recomputed.
        Requests that ended between the steps are released first, so that none of them holds a row.
        """
        self.inside = False  # an interrupt may have kept `change` from resetting it
        if self.midway or self.runner.lost:
            self.recover()
        with self.change():
            self.release_ended()
            yield

    @contextlib.contextmanager
    def blame(self, requests: Sequence[Request], *, device: bool = True) -> Iterator[None]:
        """Return a context in which an error ends these requests with its message, and no other requests.

        device: whether an error in the context may come from the device. If so, CachesLost is raised for any error.
        """
        try:
            yield
        except CachesLost:  # an inner `blame` context has ended the requests concerned
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

    def fetch(self, requests: Sequence[Request], started: Any) -> Any:
        """Fetch the result of these requests' launch.

        Raises: CachesLost if logits were not finite because sums over two GPUs were lost. The requests are computed
          again. Those with such logits end with an error if the sums of the launch before were lost, too.
        """
        result = self.runner.fetch(started)
        rows = zip(requests, result.finish, strict=False)  # a program may have more rows
        damaged = [request for request, finish in rows if finish == NOT_FINITE]
        again, self.sums_lost = self.sums_lost, bool(damaged) and self.runner.out_of_step()
        if not self.sums_lost:
            return result
        if not again:
            logger.warning("partial sums of two GPUs were lost: the requests of this launch are computed again")
        for program in (started, *(queued.result for queued in self.queued)):
            self.runner.wait(program)  # both GPUs must have ended before the memory that they write to is freed
        with self.blame(damaged if again else ()):
            raise RuntimeError(LOST)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Return the context of a change to queues and pages. After an interrupt or error in it, `recover` is due."""
        outer = self.midway, self.inside
        try:
            self.midway = self.inside = True
            yield
            self.midway = outer[0]
        finally:
            self.inside = outer[1]

    def recover(self) -> None:
        """Reset queues, pages and caches, whose state is unknown after an interrupt. Requests' tokens are intact."""
        self.lose_caches()
        self.midway = False

    def lose_caches(self) -> None:
        """Empty the caches, remove ended requests, and let all other requests wait again.

        Requests keep their output. Their keys and values are recomputed.
        """
        ended = [r for r in self.open.values() if r.finish_reason]
        self.failed += [r for r in ended if r not in self.failed]
        for request in ended:
            request.lose_pages()
            self.open.pop(request.id, None)
        self.queued.clear()
        self.scheduler.reset(self.open.values())
        self.runner.renew()

"""Admission of requests: as many samples as the batch's rows and the queue can hold, and none during shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator

from jaxspec.server.refusal import Refusal

LONGEST_WAIT = 60  # largest value of the header Retry-After, in seconds
SMOOTHING = 0.1  # weight of the newest request in the moving average of the requests' durations
AFTER_CUT = 5.0  # largest number of seconds for which a shutdown waits for the requests that it has cut off


class Gate:
    """The count of the samples that the server works on, and the limit of that number.

    All methods run in one event loop.

    rows: number of samples that are decoded together.
    queue: number of further samples that may wait for a row.
    """

    def __init__(self, rows: int, queue: int) -> None:
        self.rows = rows
        self.most = rows + queue
        self.inside = 0  # number of admitted samples that have not ended
        self.draining = False
        self.limits: set[asyncio.Timeout] = set()  # time limits of the requests that have not ended
        self.bodies: set[asyncio.Timeout] = set()  # timeouts with which a shutdown ends the reading of bodies
        self.seconds = 1.0  # moving average of the requests' durations
        self.num_cut = 0  # number of requests that the shutdown has cut off

    def check(self, samples: int = 1) -> None:
        """Raise Refusal unless this number of samples may be admitted now."""
        if self.draining:
            raise self.shutting_down()
        if samples > self.most:
            raise Refusal(
                400,
                f"{samples} samples in one request: the server takes at most {self.most}",
                param="n",
            )
        if self.inside + samples > self.most:
            raise Refusal(
                429,
                f"the server is busy: {self.inside} samples are under way, and it takes {self.most}; try again later",
                code="server_busy",
                headers=self.retry_after(),
            )

    def shutting_down(self) -> Refusal:
        """Return the error for a request that arrives while the server shuts down."""
        return Refusal(503, "the server is shutting down", code="shutting_down", headers=self.retry_after())

    def retry_after(self) -> dict[str, str]:
        """Return the header Retry-After: the average duration of requests, in whole seconds from 1 to LONGEST_WAIT."""
        return {"Retry-After": str(min(max(math.ceil(self.seconds), 1), LONGEST_WAIT))}

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Return a context for reading a request's body. It raises Refusal once the server begins to shut down."""
        limit = asyncio.timeout(None)
        self.bodies.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            raise self.shutting_down() from None
        finally:
            self.bodies.discard(limit)

    @contextlib.contextmanager
    def enter(self, samples: int, seconds: float) -> Iterator[asyncio.Timeout]:
        """Return a context for serving a request. It yields a time limit, which the caller enters as a context too.

        samples: number of samples of the request.
        seconds: time that the request may take.

        Raises: Refusal as `check` does.
        """
        self.check(samples)
        started = time.monotonic()
        limit = asyncio.timeout(seconds)
        self.inside += samples
        self.limits.add(limit)
        try:
            yield limit
        finally:
            self.inside -= samples
            self.limits.discard(limit)
            self.seconds += SMOOTHING * (time.monotonic() - started - self.seconds)

    async def drain(self, seconds: float) -> None:
        """Admit no more requests, and wait for the admitted ones. Cut off those that need more than `seconds`.

        Requests that are cut off have AFTER_CUT seconds to end.
        """
        self.draining = True
        expire(self.bodies)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.empty()
        self.num_cut = len(self.limits)
        expire(self.limits)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AFTER_CUT):
                await self.empty()

    async def empty(self) -> None:
        """Wait until all admitted requests have ended."""
        while self.inside:
            await asyncio.sleep(0.02)


def expire(limits: Iterable[asyncio.Timeout]) -> None:
    """Make these time limits expire now."""
    for limit in limits:
        with contextlib.suppress(RuntimeError):  # raised for a time limit whose block is being left
            limit.reschedule(asyncio.get_running_loop().time())

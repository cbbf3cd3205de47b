"""Admission of as many samples as there are rows and places in the queue, and of none during shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator

from jaxspec.server.refusal import Refusal

LONGEST_WAIT = 60  # seconds, limit of Retry-After
SMOOTHING = 0.1  # weight of the newest request in the moving average of their durations
AFTER_CUT = 5.0  # seconds in which requests that the drain has cut off have to end


class Gate:
    """The requests under way and their limits, all in one event loop.

    rows: samples that are decoded together.
    queue: further samples that may wait for a row.
    """

    def __init__(self, rows: int, queue: int) -> None:
        self.rows = rows
        self.most = rows + queue
        self.inside = 0  # samples under way
        self.draining = False
        self.limits: set[asyncio.Timeout] = set()  # one for each request under way
        self.bodies: set[asyncio.Timeout] = set()  # one for each body that is being read
        self.seconds = 1.0  # moving average of the requests' durations
        self.num_cut = 0  # requests that the drain has cut off

    def check(self, samples: int = 1) -> None:
        """Raise Refusal unless so many samples may be admitted now."""
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
        """Return the refusal of a request that comes while the server shuts down."""
        return Refusal(503, "the server is shutting down", code="shutting_down", headers=self.retry_after())

    def retry_after(self) -> dict[str, str]:
        """Return the header Retry-After: the average duration of recent requests, in seconds."""
        return {"Retry-After": str(min(max(math.ceil(self.seconds), 1), LONGEST_WAIT))}

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Read a body inside this context. Raise Refusal when the drain begins, since the request would be refused."""
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
        """Serve a request inside this context, which yields its time limit for the caller to enter.

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
        """Admit no more requests, and wait until all have ended. Cut off those that have not ended in `seconds`."""
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
        """Wait until no request is under way."""
        while self.inside:
            await asyncio.sleep(0.02)


def expire(limits: Iterable[asyncio.Timeout]) -> None:
    """Let these time limits end now."""
    for limit in limits:
        with contextlib.suppress(RuntimeError):  # its block is being left
            limit.reschedule(asyncio.get_running_loop().time())

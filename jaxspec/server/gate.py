"""Who is let in: as many samples as there are rows and places to wait, and nobody while the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator

from jaxspec.server.refusal import Refusal

LONGEST_WAIT = 60  # seconds that a client is told to wait at most
SMOOTHING = 0.1  # of the seconds that requests take
AFTER_CUT = 5.0  # seconds in which those that were cut off have to leave


class Gate:
    """Requests under way, all in one event loop. rows: samples decoded together; queue: those that may wait."""

    def __init__(self, rows: int, queue: int) -> None:
        self.rows, self.most = rows, rows + queue
        self.inside = 0  # samples
        self.draining = False
        self.limits: set[asyncio.Timeout] = set()  # a request's each
        self.bodies: set[asyncio.Timeout] = set()  # of bodies that are being read
        self.seconds = 1.0  # that requests took lately
        self.num_cut = 0  # requests that the drain cut off

    def check(self, samples: int = 1) -> None:
        """Raises Refusal where so many samples are not let in now."""
        if self.draining:
            raise self.ending()
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
                headers=self.later(),
            )

    def ending(self) -> Refusal:
        return Refusal(503, "the server is shutting down", code="shutting_down", headers=self.later())

    def later(self) -> dict[str, str]:
        """As long as requests took lately."""
        return {"Retry-After": str(min(max(math.ceil(self.seconds), 1), LONGEST_WAIT))}

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """A body is being read. Raises Refusal when the drain begins: the request would not be let in."""
        limit = asyncio.timeout(None)
        self.bodies.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            raise self.ending() from None
        finally:
            self.bodies.discard(limit)

    @contextlib.contextmanager
    def enter(self, samples: int, seconds: float) -> Iterator[asyncio.Timeout]:
        """A request is inside -> its time limit, to be entered. Raises Refusal as `check` does."""
        self.check(samples)
        started, limit = time.monotonic(), asyncio.timeout(seconds)
        self.inside += samples
        self.limits.add(limit)
        try:
            yield limit
        finally:
            self.inside -= samples
            self.limits.discard(limit)
            self.seconds += SMOOTHING * (time.monotonic() - started - self.seconds)

    async def drain(self, seconds: float) -> None:
        """Lets nobody in any more, and returns when nobody is inside: what has not ended in time is cut off."""
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
        while self.inside:
            await asyncio.sleep(0.02)


def expire(limits: Iterable[asyncio.Timeout]) -> None:
    """Let these time limits end now."""
    for limit in limits:
        with contextlib.suppress(RuntimeError):  # it is about to leave
            limit.reschedule(asyncio.get_running_loop().time())

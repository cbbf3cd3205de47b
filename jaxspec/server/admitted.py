"""Responses whose work is admitted, limited in time, and ended when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from jaxspec.server.gate import Gate
from jaxspec.server.refusal import Refusal

CHUNK = 65_536  # largest number of bytes that are sent at once of an answer that is not streamed


class Admitted(Response):
    """An ASGI response that does its work while the server sends it. Whatever ends `__call__` also ends the work.

    gate: limit of the samples that are served at a time.
    samples: number of samples that the work counts as.
    seconds: time that the work and the sending may take.
    """

    def __init__(self, gate: Gate, samples: int, seconds: float) -> None:
        super().__init__()
        self.gate = gate
        self.samples = samples
        self.seconds = seconds
        self.started = False  # whether the HTTP status has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_yield(message: Any) -> None:
            self.started = self.started or message["type"] == "http.response.start"
            await send(message)
            await asyncio.sleep(0)  # gives other requests a turn even if this client reads without any delay

        with self.gate.enter(self.samples, self.seconds) as limit:
            try:
                async with limit:
                    await unless_gone(receive, self.work(send_and_yield))
            except Exception as error:
                reported = self.reported(error, limit.expired())
                if not self.started:
                    raise reported from None
                scope.setdefault("state", {})["refusal"] = reported  # read by the request log
                await self.break_off(reported, send)

    async def work(self, send: Send) -> None:
        """Do the work and send its result."""
        raise AssertionError

    async def break_off(self, error: Exception, send: Send) -> None:
        """End a response that has begun. The connection closes before its end if this sends nothing."""

    def reported(self, error: Exception, expired: bool) -> Exception:
        """Return the error that the client receives for `error`. expired: whether the request's time is over."""
        return self.too_late() if isinstance(error, TimeoutError) and expired else error

    def too_late(self) -> Refusal:
        """Return the error for a request whose time is over, or that the shutdown has cut off."""
        if self.gate.draining:
            return Refusal(503, "the server shut down before the request was done", code="shutting_down")
        message = f"not done within {self.seconds:g} seconds: ask for less, or raise --request-timeout"
        return Refusal(504, message, code="request_timeout", headers={"x-should-retry": "false"})


async def send_document(send: Send, body: bytes) -> None:
    """Send a JSON document in chunks. `send` waits until the previous chunk has been written to the socket."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(body), CHUNK):
        await send({"type": "http.response.body", "body": body[start : start + CHUNK], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine `work`, and cancel it if the client disconnects first."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""One request from when it is let in until its client has the answer, leaves, or has waited too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from jaxspec.async_llm import AsyncLLM
from jaxspec.errors import UserError
from jaxspec.outputs import RequestOutput, StreamOutput
from jaxspec.server.answers import Answer
from jaxspec.server.fields import Wish
from jaxspec.server.gate import Gate
from jaxspec.server.prepared import Asked, prepared
from jaxspec.server.refusal import Refusal, of_user_error

logger = logging.getLogger(__name__)

LAST_WORD = 1.0  # seconds for the error that ends a stream: its reader may have stopped reading
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
Piece = tuple[int, StreamOutput]  # and the index of its stream


class Generation(Response):
    """A response that generates what it says. All of it happens within the one call of the server, so that whatever
    ends that call ends the request in the engine too.

    room: the most tokens of a prompt with its output.
    seconds: it may take.
    control: control tokens that its texts may not hold, by id.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        gate: Gate,
        wish: Wish,
        answer: Answer,
        room: int,
        seconds: float,
        control: Mapping[int, str],
    ) -> None:
        super().__init__()
        self.llm, self.gate, self.wish, self.answer = llm, gate, wish, answer
        self.room, self.seconds, self.control = room, seconds, control
        self.started = False  # whether the status is out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard(message: Any) -> None:
            self.started = self.started or message["type"] == "http.response.start"
            await send(message)

        async def work() -> None:
            asked = await prepared(self.llm, self.wish, self.room, self.control)
            self.answer.prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt, _ in asked)
            await (self.stream(asked, heard) if self.wish.stream else self.whole(asked, scope, receive, heard))

        with self.gate.enter(self.wish.samples, self.seconds) as limit:
            try:
                async with limit:
                    await unless_gone(receive, work())
            except Exception as error:
                refusal = self.told(error, limit.expired())
                if not self.started:
                    raise refusal from None
                scope.setdefault("state", {})["refusal"] = refusal  # for the request log
                if self.wish.stream:  # else the connection ends within the answer
                    await self.last_word(refusal, send)

    def told(self, error: Exception, expired: bool) -> Exception:
        """What the client is told of it."""
        if isinstance(error, TimeoutError) and expired:
            return self.too_late()
        if isinstance(error, UserError):
            return of_user_error(error, self.wish.source, vars(self.wish.params))
        return error

    def too_late(self) -> Refusal:
        if self.gate.draining:
            return Refusal(503, "the server is shutting down, and this was not done in time", code="shutting_down")
        message = f"not done within {self.seconds:g} seconds: ask for less, or raise --request-timeout"
        return Refusal(504, message, code="request_timeout", headers={"x-should-retry": "false"})

    async def whole(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        outputs: list[RequestOutput] = await together([self.llm.generate(*each) for each in asked])
        for output in outputs:
            for completion in output.outputs:
                check_whole(completion.finish_reason, completion.error)
        written = self.answer.whole
        # Log-probabilities of long answers are megabytes, and the loop has others to serve.
        body = written(outputs) if self.wish.params.logprobs is None else await asyncio.to_thread(written, outputs)
        response = Response(body, media_type="application/json")
        await response(scope, receive, send)

    async def stream(self, asked: Asked, send: Send) -> None:
        """The status goes out with the first piece: what fails before has a status of its own."""
        streams = [self.llm.stream(*each) for each in asked]  # refuses what is wrong
        async with contextlib.aclosing(merged(streams)) as pieces:
            async for index, piece in pieces:
                check_whole(piece.finish_reason, piece.error)
                if not self.started:
                    headers = [(name.encode(), value.encode()) for name, value in EVENTS.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await self.say(send, *self.answer.first())
                await self.say(send, *self.answer.piece(index, piece))
        await self.say(send, *self.answer.last(), "[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def say(self, send: Send, *events: str) -> None:
        if events:
            body = "".join(f"data: {event}\n\n" for event in events).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def last_word(self, error: Exception, send: Send) -> None:
        """A stream that cannot go on says why."""
        if not isinstance(error, Refusal):
            logger.error("a stream failed", exc_info=error)
            error = Refusal(500, "the server failed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self.say(send, self.answer.error(error))
                await send({"type": "http.response.body", "body": b""})


def check_whole(finish_reason: str | None, error: str | None) -> None:
    if finish_reason == "error":
        raise Refusal(500, f"the request failed: {error}", code="generation_failed")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, and lets it be where the client goes away first."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all; where one fails, the others end."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await let_go(tasks)


async def merged(streams: Sequence[AsyncGenerator[StreamOutput, None]]) -> AsyncGenerator[Piece, None]:
    """(index, piece) of all streams as they come; where one fails, the others end."""
    found: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def read(index: int, stream: AsyncGenerator[StreamOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    found.put_nowait((index, piece))
            found.put_nowait(None)
        except Exception as error:
            found.put_nowait(error)

    tasks = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        await let_go(tasks)


async def let_go(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

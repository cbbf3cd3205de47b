"""One request from when it is let in until its client has the answer, leaves, or has waited too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.prompts import Ask
from jaxspec.common.errors import UserError
from jaxspec.server.answers import Answer
from jaxspec.server.fields import Wish
from jaxspec.server.gate import Gate
from jaxspec.server.offload import LARGE_ANSWER, offload
from jaxspec.server.prepared import prepared
from jaxspec.server.refusal import Refusal, of_user_error
from jaxspec.server.settings import ServerConfig

logger = logging.getLogger(__name__)

PIECE = 65_536  # bytes of a whole answer that are sent at once
CHOICE = 50  # tokens that are written in the time that a choice takes beside its own
LAST_WORD = 1.0  # seconds for the error that ends a stream: its reader may have stopped reading
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
Piece = tuple[int, StreamOutput]  # and the index of its stream


class Generation(Response):
    """A response that generates what it says. All of it happens within the one call of the server, so that whatever
    ends that call ends the request in the engine too.

    room: the most tokens of a prompt with its output.
    control: control tokens that its texts may not hold, by id.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        gate: Gate,
        wish: Wish,
        answer: Answer,
        room: int,
        config: ServerConfig,
        control: Mapping[int, str],
    ) -> None:
        super().__init__()
        self.llm, self.gate, self.wish, self.answer = llm, gate, wish, answer
        self.room, self.seconds, self.control = room, config.request_timeout, control
        self.max_logprobs = config.max_answer_logprobs
        self.started = False  # whether the status is out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard(message: Any) -> None:
            self.started = self.started or message["type"] == "http.response.start"
            await send(message)
            await asyncio.sleep(0)  # a client that takes all at once leaves the others their turns

        async def work() -> None:
            asked = await prepared(self.llm, self.wish, self.room, self.control)
            self.check_size(asked)
            self.answer.prompt_tokens = sum(len(ask.ids) for ask in asked)
            await (self.stream(asked, heard) if self.wish.stream else self.whole(asked, heard))

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

    def check_size(self, asked: Sequence[Ask]) -> None:
        """Raise Refusal where the answer could hold too many log-probabilities."""
        self.num_logprobs = sum(most_logprobs(ask, self.room) for ask in asked)
        if self.num_logprobs > self.max_logprobs:
            raise Refusal(
                400,
                f"the answer could hold {self.num_logprobs} log-probabilities (samples x tokens x those of a token): "
                f"the server takes at most {self.max_logprobs}; ask for fewer, or raise --max-answer-logprobs",
                param="logprobs" if self.wish.params.prompt_logprobs is None else "prompt_logprobs",
            )

    async def whole(self, asked: Sequence[Ask], send: Send) -> None:
        body = await self.written(asked)  # without the outputs, whose memory is more
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(body), PIECE):  # each waits until the client has taken the one before
            await send({"type": "http.response.body", "body": body[start : start + PIECE], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def written(self, asked: Sequence[Ask]) -> bytes:
        """Generate all outputs -> the answer."""
        outputs: list[RequestOutput] = await together([self.llm.generate(ask) for ask in asked])
        completions = [completion for output in outputs for completion in output.outputs]
        for completion in completions:
            check_whole(completion.finish_reason, completion.error)
        size = self.num_logprobs + sum(len(completion.token_ids) + CHOICE for completion in completions)
        return await offload(size > LARGE_ANSWER, lambda: self.answer.whole(outputs).encode())

    async def stream(self, asked: Sequence[Ask], send: Send) -> None:
        """The status goes out with the first piece: what fails before has a status of its own."""
        streams = [self.llm.stream(ask) for ask in asked]
        async with contextlib.aclosing(merged(streams)) as pieces:
            async for index, piece in pieces:
                check_whole(piece.finish_reason, piece.error)
                if not self.started:
                    headers = [(name.encode(), value.encode()) for name, value in EVENTS.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await self.say(send, self.answer.first())
                size = len(piece.token_ids) * (1 + per_token(self.wish.params.logprobs))
                events = self.answer.piece(index, piece)
                await self.say(send, await offload(size > LARGE_ANSWER, list, events))
        await self.say(send, [*self.answer.last(), "[DONE]"])
        await send({"type": "http.response.body", "body": b""})

    async def say(self, send: Send, events: Iterable[str]) -> None:
        for event in events:
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})

    async def last_word(self, error: Exception, send: Send) -> None:
        """A stream that cannot go on says why."""
        if not isinstance(error, Refusal):
            logger.error("a stream failed", exc_info=error)
            error = Refusal(500, "the server failed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self.say(send, [self.answer.error(error)])
                await send({"type": "http.response.body", "body": b""})


def most_logprobs(ask: Ask, room: int) -> int:
    """Return the most log-probabilities that the answer to a prompt can hold."""
    params, length = ask.params, len(ask.ids)
    output = min(params.max_tokens, max(room - length, 0)) * per_token(params.logprobs)
    return params.n * (length * per_token(params.prompt_logprobs) + output)


def per_token(asked: int | None) -> int:
    """Return the most log-probabilities that come with a token: those asked for, and its own."""
    return 0 if asked is None else asked + 1


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

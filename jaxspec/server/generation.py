"""Serving of one request: from its admission until the answer is sent, the client disconnects or time is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Send

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.prompts import PromptRequest
from jaxspec.common.errors import UserError
from jaxspec.server.admitted import Admitted, send_document
from jaxspec.server.answers import Answer
from jaxspec.server.echo import echoes
from jaxspec.server.fields import RequestFields
from jaxspec.server.gate import Gate
from jaxspec.server.offload import LARGE_ANSWER, PROMPTS, offload
from jaxspec.server.prepared import prepared
from jaxspec.server.refusal import Refusal, refusal_for
from jaxspec.server.settings import ServerConfig

logger = logging.getLogger(__name__)

CHOICE = 50  # estimated work of serialising an entry of an answer's `choices`, besides its tokens, in tokens
# Largest number of seconds for sending the error that ends a stream. The client may have stopped reading.
ERROR_SECONDS = 1.0
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
Piece = tuple[int, StreamOutput]  # (index of the prompt's stream, piece of its output)


class Generation(Admitted):
    """An ASGI response that generates its text while the server sends it: preparation, decoding and sending.

    gate: limit of the samples that are served at a time.
    room: largest number of tokens that a prompt and its output may have together.
    control: text of each control token, such as <|im_end|>, that the request may not contain, by token id.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        gate: Gate,
        request: RequestFields,
        answer: Answer,
        room: int,
        config: ServerConfig,
        control: Mapping[int, str],
    ) -> None:
        super().__init__(gate, request.samples, config.request_timeout)
        self.llm = llm
        self.request = request
        self.answer = answer
        self.room = room
        self.control = control
        self.max_logprobs = config.max_answer_logprobs

    async def work(self, send: Send) -> None:
        asks = await prepared(self.llm, self.request, self.room, self.control)
        self.check_size(asks)
        self.answer.begin(asks, self.llm.llm.tokenizer)
        size = self.answer.prompt_tokens
        if self.request.echo:
            made = echoes, self.llm.llm.tokenizer, asks, self.request.params.n
            self.answer.echoes = await offload(size > LARGE_ANSWER, *made, threads=PROMPTS)
        if self.request.stream:
            await self.stream(asks, send)
        else:
            await self.whole(asks, send)

    async def break_off(self, error: Exception, send: Send) -> None:
        if self.request.stream:  # an answer that is not streamed can only break off
            await self.send_error(error, send)

    def reported(self, error: Exception, expired: bool) -> Exception:
        if isinstance(error, UserError):
            return refusal_for(error, self.request.source, vars(self.request.params))
        return super().reported(error, expired)

    def check_size(self, asks: Sequence[PromptRequest]) -> None:
        """Raise Refusal if the answer to these prompts could hold too many log-probabilities."""
        self.num_logprobs = sum(most_logprobs(self.request, ask, self.room) for ask in asks)
        if self.num_logprobs > self.max_logprobs:
            raise Refusal(
                400,
                f"the answer could hold {self.num_logprobs} log-probabilities (samples x tokens x those of a token): "
                f"the server takes at most {self.max_logprobs}; ask for fewer, or raise --max-answer-logprobs",
                param="logprobs" if self.request.prompt_logprobs is None else "prompt_logprobs",
            )

    async def whole(self, asks: Sequence[PromptRequest], send: Send) -> None:
        """Generate the answer to these prompts and send it in one JSON document."""
        body = await self.written(asks)  # the outputs, which take more memory than this body, are freed by now
        await send_document(send, body)

    async def written(self, asks: Sequence[PromptRequest]) -> bytes:
        """Generate the outputs of all prompts, and return the answer as JSON."""
        outputs: list[RequestOutput] = await gathered([self.llm.generate(ask) for ask in asks])
        completions = [completion for output in outputs for completion in output.outputs]
        for completion in completions:
            check_whole(completion.finish_reason, completion.error)
        size = self.num_logprobs + sum(len(completion.token_ids) + CHOICE for completion in completions)
        size += self.answer.prompt_tokens * self.request.params.n * self.request.echo
        return await offload(size > LARGE_ANSWER, lambda: self.answer.whole(outputs).encode())

    async def stream(self, asks: Sequence[PromptRequest], send: Send) -> None:
        """Generate the answer and send it as events.

        Status 200 is sent with the first piece of output, so that an earlier error can have its own status.
        """
        streams = [self.llm.stream(ask) for ask in asks]
        async with contextlib.aclosing(merged(streams)) as pieces:
            async for index, piece in pieces:
                check_whole(piece.finish_reason, piece.error)
                if not self.started:
                    headers = [(name.encode(), value.encode()) for name, value in EVENTS.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await self.send_events(send, self.answer.first())
                num_tokens = len(piece.token_ids) + len(piece.prompt_logprobs or ())
                size = num_tokens * (1 + per_token(self.request.params.logprobs))
                if piece.finish_reason:  # the last events may repeat all that came before
                    size = max(size, self.num_logprobs)
                events = self.answer.piece(index, piece)
                await self.send_events(send, await offload(size > LARGE_ANSWER, list, events))
        last: list[str] = await offload(self.num_logprobs > LARGE_ANSWER, list, self.answer.last())
        await self.send_events(send, [*last, *self.answer.end])
        await send({"type": "http.response.body", "body": b""})

    async def send_events(self, send: Send, events: Iterable[str]) -> None:
        for event in events:
            body = f"{self.answer.heading(event)}{event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def send_error(self, error: Exception, send: Send) -> None:
        """End a stream with an event that reports this error."""
        if not isinstance(error, Refusal):
            logger.error("a stream failed", exc_info=error)
            error = Refusal(500, "the server failed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SECONDS):
                await self.send_events(send, [self.answer.error(error)])
                await send({"type": "http.response.body", "body": b""})


def most_logprobs(request: RequestFields, ask: PromptRequest, room: int) -> int:
    """Return the largest number of log-probabilities that the answer to a prompt of the request can hold.

    room: largest number of tokens that the prompt and its output may have together.
    """
    params = ask.params
    length = len(ask.ids)
    scored = min(params.max_tokens, max(room - length, 0)) + length * request.echo
    return params.n * (length * per_token(request.prompt_logprobs) + scored * per_token(params.logprobs))


def per_token(asked: int | None) -> int:
    """Return the largest number of log-probabilities for one token: the requested ones and the chosen token's.

    asked: requested number of most probable tokens; None if no log-probabilities are requested.
    """
    return 0 if asked is None else asked + 1


def check_whole(finish_reason: str | None, error: str | None) -> None:
    """Raise Refusal if an output has the finish reason "error"."""
    if finish_reason == "error":
        raise Refusal(500, f"the request failed: {error}", code="generation_failed")


async def gathered(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return the results of all calls. If one call fails, cancel the others; asyncio.gather alone would not."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def merged(streams: Sequence[AsyncGenerator[StreamOutput, None]]) -> AsyncGenerator[Piece, None]:
    """Yield (index of the stream, piece) from all streams in order of arrival.

    If one stream fails, cancel the others and raise its error.
    """
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
        await cancel(tasks)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended. The tasks' errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

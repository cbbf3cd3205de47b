"""Answers to requests: engine outputs as JSON of OpenAI's classes, with the fields that vLLM adds."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.server import logprobs as entries
from jaxspec.server.fields import RequestFields
from jaxspec.server.lines import one_line
from jaxspec.server.refusal import Refusal

REASONS = {"abort": "stop"}  # finish reason here -> OpenAI's, where the two differ


class Answer(Protocol):
    """The answer to a request, written either as a whole or as the events of a stream. All results are JSON texts."""

    prompt_tokens: int

    def whole(self, outputs: Sequence[RequestOutput]) -> str:
        """Return the whole answer."""

    def first(self) -> Iterable[str]:
        """Return the events that come before all text."""

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        """Return the events for a piece of the output. index: the prompt's index in the request."""

    def last(self) -> Iterable[str]:
        """Return the events that come after all text."""

    def error(self, refusal: Refusal) -> str:
        """Return the event that reports an error."""


class Base:
    """The common part of both endpoints' answers.

    kind, chunk_kind: OpenAI's names of the whole answer and of an event.
    prefix: beginning of the answer's id.
    document, chunk: OpenAI's classes of the whole answer and of an event.
    model: name that clients use for the model.
    request: parameters of the request.
    """

    kind, prefix, chunk_kind = "", "", ""
    document: Any
    chunk: Any

    def __init__(self, model: str, request: RequestFields) -> None:
        self.model = model
        self.request = request
        self.prompt_tokens = 0  # sum over all prompts, set once they are tokenised
        self.n = request.params.n
        self.num_top = request.params.logprobs or 0  # most probable tokens listed for each position
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.num_tokens = 0
        self.reasons: Counter[str] = Counter()  # finish reasons of its samples
        self.offsets: Counter[int] = Counter()  # characters so far, by index of the choice

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields with which each of OpenAI's objects begins."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> CompletionUsage:
        total = self.prompt_tokens + self.num_tokens
        return CompletionUsage(prompt_tokens=self.prompt_tokens, completion_tokens=self.num_tokens, total_tokens=total)

    def whole(self, outputs: Sequence[RequestOutput]) -> str:
        self.num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        for output in outputs:
            self.reasons.update(str(completion.finish_reason) for completion in output.outputs)
        choices = (  # a generator: each choice exists only while it is serialised, which saves memory
            self.choice(index * self.n + completion.index, completion, output)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        )
        more = self.extra_fields(outputs)
        return written(self.document.construct(**self.head(self.kind), choices=choices, usage=self.usage(), **more))

    def extra_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the fields that a whole answer has besides OpenAI's."""
        return {}

    def event(self, choices: list[Any], usage: CompletionUsage | None = None) -> str:
        """Return one event. If the client asked for usage every event has that field, null unless it is known."""
        if self.request.running_usage:
            usage = self.usage()
        more = {"usage": usage} if self.request.usage else {}
        return written(self.chunk.construct(**self.head(self.chunk_kind), choices=choices, **more))

    def first(self) -> Iterable[str]:
        return ()

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        self.num_tokens += len(piece.token_ids)
        if piece.finish_reason:
            self.reasons[piece.finish_reason] += 1
        if piece.text or piece.logprobs or piece.finish_reason:  # else it ends within a character: nothing to send yet
            yield self.event([self.part(index * self.n + piece.sample, piece)])

    def last(self) -> Iterable[str]:
        if self.request.usage:
            yield self.event([], self.usage())

    def error(self, refusal: Refusal) -> str:
        return refusal.as_json()

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Any:
        """Return a choice of the whole answer."""
        raise AssertionError

    def part(self, index: int, piece: StreamOutput) -> Any:
        """Return a choice of one event."""
        raise AssertionError


class TextAnswer(Base):
    """An answer of /v1/completions. Its events have the same form as the whole answer."""

    kind = chunk_kind = "text_completion"
    prefix, document, chunk = "cmpl", Completion, Completion

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        return self.part(index, completion, **entries.of_prompt(output))

    def part(self, index: int, piece: StreamOutput | CompletionOutput, **more: Any) -> CompletionChoice:
        logprobs = None
        if piece.logprobs is not None:
            logprobs, self.offsets[index] = entries.of_text(piece.logprobs, piece.token_ids, self.offsets[index])
        return CompletionChoice.construct(
            index=index,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=reason(piece),
            stop_reason=piece.stop_reason,
            **more,
        )


class ChatAnswer(Base):
    """An answer of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    document, chunk = ChatCompletion, ChatCompletionChunk

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Choice:
        return Choice.construct(
            index=index,
            message=ChatCompletionMessage.construct(role=self.request.role, content=completion.text, refusal=None),
            logprobs=entries.of_chat(completion, self.num_top),
            finish_reason=reason(completion),
            stop_reason=completion.stop_reason,
        )

    def extra_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return entries.of_prompt(output)

    def first(self) -> Iterable[str]:
        for index in range(self.n):
            delta = ChoiceDelta.construct(role=self.request.role, content="")
            yield self.event([ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def part(self, index: int, piece: StreamOutput) -> ChunkChoice:
        return ChunkChoice.construct(
            index=index,
            delta=ChoiceDelta(content=piece.text),
            logprobs=entries.of_chat(piece, self.num_top),
            finish_reason=reason(piece),
            stop_reason=piece.stop_reason,
        )


def reason(output: StreamOutput | CompletionOutput) -> Any:
    """Return OpenAI's name for why an output ended, or None while it goes on."""
    return REASONS.get(str(output.finish_reason), output.finish_reason)


def written(document: Any) -> str:
    """Serialise the fields of a document that were set. vLLM's are not declared, so pydantic's warnings are off."""
    return one_line(document.model_dump_json(exclude_unset=True, warnings=False))

"""Outputs as OpenAI's objects, in JSON: its own classes, and vLLM's additions."""

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
from jaxspec.server.fields import Wish
from jaxspec.server.lines import one_line
from jaxspec.server.refusal import Refusal

REASONS = {"abort": "stop"}  # what OpenAI has no name for; the others are its own


class Answer(Protocol):
    """What a client gets: a whole answer, or events. index: of the prompt."""

    prompt_tokens: int

    def whole(self, outputs: Sequence[RequestOutput]) -> str: ...
    def first(self) -> Iterable[str]: ...
    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]: ...
    def last(self) -> Iterable[str]: ...
    def error(self, refusal: Refusal) -> str: ...


class Base:
    """model: its name for clients; wish: what was asked for."""

    kind, prefix, chunk_kind = "", "", ""
    document: Any
    chunk: Any

    def __init__(self, model: str, wish: Wish) -> None:
        self.model, self.wish, params = model, wish, wish.params
        self.prompt_tokens = 0  # of all prompts, when they are counted
        self.n, self.most = params.n, params.logprobs or 0  # likeliest tokens beside each
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.num_tokens = 0
        self.reasons: Counter[str] = Counter()  # why its samples ended
        self.offsets: Counter[int] = Counter()  # characters of each choice's tokens

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> CompletionUsage:
        whole = self.prompt_tokens + self.num_tokens
        return CompletionUsage(prompt_tokens=self.prompt_tokens, completion_tokens=self.num_tokens, total_tokens=whole)

    def whole(self, outputs: Sequence[RequestOutput]) -> str:
        self.num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        for output in outputs:
            self.reasons.update(str(completion.finish_reason) for completion in output.outputs)
        choices = (  # each is made when it is written
            self.choice(index * self.n + completion.index, completion, output)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        )
        more = self.beside(outputs)
        return written(self.document.construct(**self.head(self.kind), choices=choices, usage=self.usage(), **more))

    def beside(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What a whole answer has beside its choices."""
        return {}

    def event(self, choices: list[Any], usage: CompletionUsage | None = None) -> str:
        if self.wish.running_usage:
            usage = self.usage()
        told = {"usage": usage} if self.wish.usage else {}
        return written(self.chunk.construct(**self.head(self.chunk_kind), choices=choices, **told))

    def first(self) -> Iterable[str]:
        return ()

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        self.num_tokens += len(piece.token_ids)
        if piece.finish_reason:
            self.reasons[piece.finish_reason] += 1
        if piece.text or piece.logprobs or piece.finish_reason:  # or it ends within a character
            yield self.event([self.part(index * self.n + piece.sample, piece)])

    def last(self) -> Iterable[str]:
        if self.wish.usage:
            yield self.event([], self.usage())

    def error(self, refusal: Refusal) -> str:
        return refusal.as_json()

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Any:
        raise AssertionError

    def part(self, index: int, piece: StreamOutput) -> Any:
        raise AssertionError


class TextAnswer(Base):
    """Of /v1/completions, whose events have the same form as the whole."""

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
    """Of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    document, chunk = ChatCompletion, ChatCompletionChunk

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Choice:
        return Choice.construct(
            index=index,
            message=ChatCompletionMessage.construct(role=self.wish.role, content=completion.text, refusal=None),
            logprobs=entries.of_chat(completion, self.most),
            finish_reason=reason(completion),
            stop_reason=completion.stop_reason,
        )

    def beside(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return entries.of_prompt(output)

    def first(self) -> Iterable[str]:
        for index in range(self.n):
            delta = ChoiceDelta.construct(role=self.wish.role, content="")
            yield self.event([ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])

    def part(self, index: int, piece: StreamOutput) -> ChunkChoice:
        return ChunkChoice.construct(
            index=index,
            delta=ChoiceDelta(content=piece.text),
            logprobs=entries.of_chat(piece, self.most),
            finish_reason=reason(piece),
            stop_reason=piece.stop_reason,
        )


def reason(output: StreamOutput | CompletionOutput) -> Any:
    return REASONS.get(str(output.finish_reason), output.finish_reason)


def written(document: Any) -> str:
    """What was set of it; the additions are fields of no class, so that pydantic would warn."""
    return one_line(document.model_dump_json(exclude_unset=True, warnings=False))

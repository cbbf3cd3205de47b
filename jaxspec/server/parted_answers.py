"""Answers of chats whose text is parted: into reasoning, content and calls of tools."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from openai.types.chat import ChatCompletionMessageFunctionToolCall as MessageCall
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall

from jaxspec.api.grammars import last_mark
from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.api.prompts import PromptRequest
from jaxspec.server.answers import ChatAnswer
from jaxspec.server.fields import RequestFields
from jaxspec.server.reasoning import ReasoningReader
from jaxspec.server.tool_formats import Call


class Parts(NamedTuple):
    """The parts of a text: reasoning, content, and calls of tools."""

    reasoning: str
    content: str
    calls: list[Call]


class PartsReader:
    """The reader of one sample's text, which parts it as it comes.

    mark: mark of reasoning that the prompt ends with, or None.
    """

    def __init__(self, request: RequestFields, mark: str | None) -> None:
        self.reasoning = ReasoningReader(request.reasoning, mark) if request.reasoning else None
        self.tools = request.tools.reader() if request.tools else None

    def read(self, text: str, *, ended: bool) -> Parts:
        """Add a piece of the text, and return the parts that are certain now. ended: whether it is the last piece."""
        reasoning, calls = "", list[Call]()
        if self.reasoning:
            reasoning, text = self.reasoning.read(text, ended=ended)
        if self.tools:
            text, calls = self.tools.read(text, ended=ended)
        return Parts(reasoning, text, calls)


class PartedAnswer(ChatAnswer):
    """An answer of /v1/chat/completions whose text is parted. Each call is one delta of a stream."""

    def __init__(self, model: str, request: RequestFields) -> None:
        super().__init__(model, request)
        self.mark: str | None = None
        self.readers: dict[int, PartsReader] = {}  # by sample
        self.num_calls: Counter[int] = Counter()  # number of calls sent, by sample

    def begin(self, asks: Sequence[PromptRequest], tokenizer: Any) -> None:
        super().begin(asks, tokenizer)
        if self.request.reasoning:
            self.mark = last_mark(tokenizer, asks[0].ids)

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Choice:
        parts = PartsReader(self.request, self.mark).read(completion.text, ended=True)
        found = super().choice(index, completion, output)
        found.message.content = parts.content or (None if parts.calls or parts.reasoning else "")
        if parts.reasoning:
            found.message.reasoning_content = parts.reasoning  # type: ignore[attr-defined]
        if parts.calls:
            found.message.tool_calls = [MessageCall.construct(**described(call)) for call in parts.calls]
            found.finish_reason = reason(found.finish_reason)
        return found

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        sample = piece.sample
        if sample not in self.readers:
            self.readers[sample] = PartsReader(self.request, self.mark)
        reasoning, content, calls = self.readers[sample].read(piece.text, ended=piece.finish_reason is not None)
        if reasoning:
            yield self.delta(sample, ChoiceDelta.construct(reasoning_content=reasoning))
        if calls:
            yield self.called(sample, content, calls)
            content = ""
        if self.num_calls[sample]:
            piece = dataclasses.replace(piece, finish_reason=reason(piece.finish_reason))
        yield from super().piece(index, dataclasses.replace(piece, text=content))

    def called(self, sample: int, content: str, calls: Sequence[Call]) -> str:
        """Return the event with these calls, and the content that came with them."""
        deltas = [
            ChoiceDeltaToolCall.construct(index=self.num_calls[sample] + i, **described(call))
            for i, call in enumerate(calls)
        ]
        self.num_calls[sample] += len(calls)
        delta = ChoiceDelta.construct(tool_calls=deltas)
        if content:
            delta.content = content
        return self.delta(sample, delta)

    def delta(self, sample: int, delta: ChoiceDelta) -> str:
        """Return an event with this delta of a sample."""
        return self.event([ChunkChoice.construct(index=sample, delta=delta, logprobs=None, finish_reason=None)])


def described(call: Call) -> dict[str, Any]:
    """Return a call with OpenAI's names."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reason(finish_reason: Any) -> Any:
    """Return the finish reason of an output that calls tools."""
    return "tool_calls" if finish_reason == "stop" else finish_reason

"""Answers of chats with tools: calls that are found in the text become `tool_calls`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall as MessageCall
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall

from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.server.answers import ChatAnswer
from jaxspec.server.fields import RequestFields
from jaxspec.server.tool_formats import Call


class ToolAnswer(ChatAnswer):
    """An answer of /v1/chat/completions whose output may call tools. Each call is one delta of a stream."""

    def __init__(self, model: str, request: RequestFields) -> None:
        super().__init__(model, request)
        assert request.tools is not None
        self.tools = request.tools
        self.readers = [self.tools.reader() for _ in range(self.n)]
        self.num_calls: Counter[int] = Counter()  # number of calls sent, by sample

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Choice:
        content, calls = self.tools.reader().read(completion.text, ended=True)
        found = super().choice(index, completion, output)
        found.message.content = content if content or not calls else None
        if calls:
            found.message.tool_calls = [MessageCall.construct(**described(call)) for call in calls]
            found.finish_reason = reason(found.finish_reason)
        return found

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        sample = piece.sample
        content, calls = self.readers[sample].read(piece.text, ended=piece.finish_reason is not None)
        if calls:
            yield self.event([self.called(sample, content, calls)])
            content = ""
        if self.num_calls[sample]:
            piece = dataclasses.replace(piece, finish_reason=reason(piece.finish_reason))
        yield from super().piece(index, dataclasses.replace(piece, text=content))

    def called(self, sample: int, content: str, calls: Sequence[Call]) -> ChunkChoice:
        """Return the `choices` entry of an event with these calls, and the content that came with them."""
        deltas = [
            ChoiceDeltaToolCall.construct(index=self.num_calls[sample] + i, **described(call))
            for i, call in enumerate(calls)
        ]
        self.num_calls[sample] += len(calls)
        delta = ChoiceDelta.construct(tool_calls=deltas)
        if content:
            delta.content = content
        return ChunkChoice.construct(index=sample, delta=delta, logprobs=None, finish_reason=None)


def described(call: Call) -> dict[str, Any]:
    """Return a call with OpenAI's names."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reason(finish_reason: Any) -> Any:
    """Return the finish reason of an output that calls tools."""
    return "tool_calls" if finish_reason == "stop" else finish_reason

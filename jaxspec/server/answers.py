"""Conversion of the engine's outputs to JSON answers: OpenAI's objects, with the fields that vLLM adds."""

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
from jaxspec.api.prompts import PromptRequest
from jaxspec.server import logprobs as entries
from jaxspec.server.echo import Echo
from jaxspec.server.fields import RequestFields
from jaxspec.server.lines import one_line
from jaxspec.server.refusal import Refusal

REASONS = {"abort": "stop"}  # jaxspec's finish reason -> OpenAI's name, where the two differ


class Answer(Protocol):
    """Interface of the answer to a request: one JSON document (`whole`), or the events of a stream.

    Each document and each event is a JSON text.
    """

    prompt_tokens: int
    echoes: dict[int, Echo]  # prompts that are not sent yet, by index of the sample; empty without `echo`
    end: tuple[str, ...]  # events that mark the end of a stream

    def begin(self, asks: Sequence[PromptRequest], tokenizer: Any) -> None:
        """Read what the answer needs of the tokenised prompts."""

    def whole(self, outputs: Sequence[RequestOutput]) -> str:
        """Return the answer as one document."""

    def first(self) -> Iterable[str]:
        """Return the events that come before the first text."""

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        """Return the events for a piece of the output. index: index of the piece's prompt in the request."""

    def last(self) -> Iterable[str]:
        """Return the events that come after the last text."""

    def error(self, refusal: Refusal) -> str:
        """Return the event that reports this error."""

    def heading(self, event: str) -> str:
        """Return what stands before an event as it is sent."""


class Base:
    """The common part of the answers of /v1/completions and /v1/chat/completions.

    kind, chunk_kind: OpenAI's names for the type of a whole answer and of an event.
    prefix: beginning of the answer's id.
    document, chunk: OpenAI's classes of a whole answer and of an event.
    model: name that clients use for the model.
    request: parameters of the request.
    """

    kind, prefix, chunk_kind = "", "", ""
    document: Any
    chunk: Any
    end: tuple[str, ...] = ("[DONE]",)

    def __init__(self, model: str, request: RequestFields) -> None:
        self.model = model
        self.request = request
        self.prompt_tokens = 0  # number of tokens of all prompts, set once the prompts are tokenised
        self.echoes: dict[int, Echo] = {}
        self.n = request.params.n
        self.num_top = request.params.logprobs or 0  # number of most probable tokens listed for each position
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.num_tokens = 0
        self.reasons: Counter[str] = Counter()  # number of samples by finish reason
        self.offsets: Counter[int] = Counter()  # number of characters sent, with logprobs, by index in `choices`

    def head(self, kind: str) -> dict[str, Any]:
        """Return the first fields of each of OpenAI's objects: id, type, time and model. kind: type of the object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def begin(self, asks: Sequence[PromptRequest], tokenizer: Any) -> None:
        self.prompt_tokens = sum(len(ask.ids) for ask in asks)

    def usage(self) -> CompletionUsage:
        total = self.prompt_tokens + self.num_tokens
        return CompletionUsage(prompt_tokens=self.prompt_tokens, completion_tokens=self.num_tokens, total_tokens=total)

    def whole(self, outputs: Sequence[RequestOutput]) -> str:
        self.num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        for output in outputs:
            self.reasons.update(str(completion.finish_reason) for completion in output.outputs)
        choices = (  # a generator saves memory: each entry exists only while it is serialised
            self.choice(index * self.n + completion.index, completion, output)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        )
        more = self.extra_fields(outputs)
        return written(self.document.construct(**self.head(self.kind), choices=choices, usage=self.usage(), **more))

    def extra_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the top-level fields of a whole answer that OpenAI's object does not have."""
        return {}

    def event(self, choices: list[Any], usage: CompletionUsage | None = None) -> str:
        """Return one event with these `choices`. If the client asked for `usage`, every event has that field.

        usage: token counts, or None for the value null. If the client asked for counts in each event, the counts so far
          are used instead.
        """
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
        # A piece that ends within a character has no text yet.
        if piece.text or piece.logprobs or piece.token_origins or piece.finish_reason:
            yield self.event([self.part(index * self.n + piece.sample, piece)])

    def last(self) -> Iterable[str]:
        if self.request.usage:
            yield self.event([], self.usage())

    def error(self, refusal: Refusal) -> str:
        return refusal.as_json()

    def heading(self, event: str) -> str:
        return "data: "

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> Any:
        """Return the entry of a whole answer's `choices` for one sample. index: index of the entry."""
        raise AssertionError

    def part(self, index: int, piece: StreamOutput) -> Any:
        """Return the `choices` entry of one streamed event. index: index of the piece's sample in the answer."""
        raise AssertionError


class TextAnswer(Base):
    """An answer of /v1/completions. Its events have the same form as the whole answer."""

    kind = chunk_kind = "text_completion"
    prefix, document, chunk = "cmpl", Completion, Completion

    def choice(self, index: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        more = entries.of_prompt(output, self.request.prompt_logprobs)
        return self.entry(index, completion, output.prompt_logprobs or (), **more)

    def part(self, index: int, piece: StreamOutput) -> CompletionChoice:
        return self.entry(index, piece, piece.prompt_logprobs or ())

    def entry(
        self, index: int, piece: StreamOutput | CompletionOutput, rows: entries.PromptRows, **more: Any
    ) -> CompletionChoice:
        """Return the `choices` entry of an output or a piece of it. The first entry of a sample begins with the echo.

        rows: log-probabilities of the prompt, which the echo shows.
        """
        text, logprobs = piece.text, None
        echo = self.echoes.pop(index, None)
        if echo is not None:
            text = echo.text + text
            self.offsets[index] = len(echo.text)
        if piece.logprobs is not None:
            logprobs, self.offsets[index] = entries.of_text(piece.logprobs, piece.token_ids, self.offsets[index])
            if echo is not None:
                logprobs = entries.with_prompt(logprobs, echo, rows, self.num_top)
        return CompletionChoice.construct(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=reason(piece),
            stop_reason=piece.stop_reason,
            **origins_of(piece),
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
            **origins_of(completion),
        )

    def extra_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return entries.of_prompt(output, self.request.prompt_logprobs)

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
            **origins_of(piece),
        )


def reason(output: StreamOutput | CompletionOutput) -> Any:
    """Return OpenAI's finish reason of an output, or None if the output has not ended."""
    return REASONS.get(str(output.finish_reason), output.finish_reason)


def origins_of(output: StreamOutput | CompletionOutput) -> dict[str, Any]:
    """Return the field `token_origins` of a `choices` entry, or no field if the request did not ask for it."""
    return {} if output.token_origins is None else {"token_origins": output.token_origins}


def written(document: Any) -> str:
    """Serialise those fields of an OpenAI object that were set.

    pydantic's warnings are off, because OpenAI's classes do not declare the fields that vLLM adds.
    """
    return one_line(document.model_dump_json(exclude_unset=True, warnings=False))

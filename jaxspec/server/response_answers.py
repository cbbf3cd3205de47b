"""Answers of OpenAI's Responses API: a response whose output is a list of items, whole or as events."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.api.grammars import last_mark
from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.api.prompts import PromptRequest
from jaxspec.server import logprobs as entries
from jaxspec.server.answers import Base
from jaxspec.server.lines import one_line
from jaxspec.server.parted_answers import Parts, PartsReader
from jaxspec.server.refusal import Refusal, readable
from jaxspec.server.responses import ResponseFields
from jaxspec.server.tool_formats import Call

# Type of an item with text -> (its content part's type, first part of the names of its events, prefix of its id).
TEXTS = {"reasoning": ("reasoning_text", "reasoning_text", "rs"), "message": ("output_text", "output_text", "msg")}
# Field of a response that repeats the request's -> its value if the request has none.
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "user": None,
}


class ResponseAnswer(Base):
    """An answer of /v1/responses. Each call of a stream is complete when its item begins."""

    prefix = "resp"
    end = ()

    def __init__(self, model: str, fields: ResponseFields) -> None:
        super().__init__(model, fields.chat)
        self.given = fields.given
        self.mark: str | None = None  # mark of reasoning that the prompt ends with
        self.close_id: int | None = None  # token id of the mark that closes reasoning
        self.numbers = itertools.count()  # sequence numbers of events
        self.reader: PartsReader | None = None
        self.ids: list[int] = []  # token ids of the output
        self.entries: list[dict[str, Any]] = []  # log-probabilities of the output
        self.output: list[dict[str, Any]] = []  # items so far
        self.open: dict[str, Any] | None = None  # item of `output` whose text may go on
        self.finish_reason: str | None = None

    def begin(self, asks: Sequence[PromptRequest], tokenizer: Any) -> None:
        super().begin(asks, tokenizer)
        if self.request.reasoning:
            self.mark = last_mark(tokenizer, asks[0].ids)
            self.close_id = tokenizer.get_added_vocab().get(self.request.reasoning.close)
        self.reader = PartsReader(self.request, self.mark)

    def whole(self, outputs: Sequence[RequestOutput]) -> str:
        """Return the response that the events of the output would build."""
        (completion,) = outputs[0].outputs
        for _ in itertools.chain(self.events(completion), self.ended()):
            pass
        return written(self.response())

    def first(self) -> Iterable[str]:
        for kind in ("created", "in_progress"):
            yield self.named(f"response.{kind}", response=self.response())

    def piece(self, index: int, piece: StreamOutput) -> Iterable[str]:
        return self.events(piece)

    def last(self) -> Iterable[str]:
        yield from self.ended()
        response = self.response()
        yield self.named(f"response.{response['status']}", response=response)

    def error(self, refusal: Refusal) -> str:
        error = refusal.as_dict()["error"]
        flat = {name: error.get(name) for name in ("code", "message", "param")}
        return self.named("error", **flat, error=error)

    def heading(self, event: str) -> str:
        """Return what stands before an event as it is sent. Its type is the first value of its JSON."""
        kind = event.split('"', 4)[3]
        return f"event: {kind}\ndata: "

    def named(self, kind: str, **fields: Any) -> str:
        """Return an event of this type."""
        return written({"type": kind, "sequence_number": next(self.numbers), **fields})

    def events(self, piece: StreamOutput | CompletionOutput) -> Iterable[str]:
        """Yield the events for a piece of the output, and add it to the items."""
        assert self.reader is not None
        self.num_tokens += len(piece.token_ids)
        self.ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        if piece.finish_reason:
            self.reasons[str(piece.finish_reason)] += 1
        fresh: list[dict[str, Any]] = []
        if piece.logprobs is not None:
            fresh = list(entries.chat_entries(piece.token_ids, piece.logprobs, self.num_top))
            self.entries += fresh
        parts: Parts = self.reader.read(piece.text, ended=piece.finish_reason is not None)
        if parts.reasoning:
            yield from self.text("reasoning", parts.reasoning, {})
        if parts.content:
            yield from self.text("message", parts.content, {"logprobs": fresh})
        for call in parts.calls:
            yield from self.called(call)

    def text(self, kind: str, text: str, more: Mapping[str, Any]) -> Iterable[str]:
        """Yield the events for more text of an item, which begins if it is not open. more: further fields of deltas."""
        if self.open is None or self.open["type"] != kind:
            yield from self.closed()
            yield from self.opened(kind)
        assert self.open is not None
        self.open["content"][0]["text"] += text
        yield self.named(f"response.{TEXTS[kind][1]}.delta", **self.place(), delta=text, **more)

    def opened(self, kind: str) -> Iterable[str]:
        """Yield the events with which an item of text begins."""
        part, _, prefix = TEXTS[kind]
        own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        self.open = {"id": name(prefix), "type": kind, "status": "in_progress", **own, "content": []}
        yield self.named("response.output_item.added", output_index=len(self.output), item=self.open)
        self.output.append(self.open)
        fields: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
        self.open["content"].append({"type": part, "text": "", **fields})
        yield self.named("response.content_part.added", **self.place(), part=self.open["content"][0])

    def closed(self, *, last: bool = False) -> Iterable[str]:
        """Yield the events with which the open item ends, if there is one. last: whether the output ends with it."""
        if self.open is None:
            return
        item, (part,) = self.open, self.open["content"]
        more = {}
        if item["type"] == "message":
            part["logprobs"] = self.entries
            more = {"logprobs": self.entries}
        item["status"] = "incomplete" if last and self.finish_reason == "length" else "completed"
        kind = TEXTS[item["type"]][1]
        yield self.named(f"response.{kind}.done", **self.place(), text=part["text"], **more)
        yield self.named("response.content_part.done", **self.place(), part=part)
        yield self.named("response.output_item.done", output_index=len(self.output) - 1, item=item)
        self.open = None

    def ended(self) -> Iterable[str]:
        """Yield the events with which the output ends. An output without any item has an empty message."""
        if not self.output:
            yield from self.opened("message")
        yield from self.closed(last=True)

    def called(self, call: Call) -> Iterable[str]:
        """Yield the events of a call."""
        yield from self.closed()
        item = {"id": name("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id}
        item |= {"name": call.name, "arguments": ""}
        place = {"output_index": len(self.output)}
        self.output.append(item)
        yield self.named("response.output_item.added", **place, item=item)
        place["item_id"] = item["id"]  # type: ignore[assignment]
        yield self.named("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self.named("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        item |= {"status": "completed", "arguments": call.arguments}
        yield self.named("response.output_item.done", output_index=place["output_index"], item=item)

    def place(self) -> dict[str, Any]:
        """Return the fields that say to which part of the output an event belongs."""
        assert self.open is not None
        return {"item_id": self.open["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        cut = self.finish_reason == "length"
        status = "incomplete" if cut else "completed" if self.finish_reason else "in_progress"
        ended = self.finish_reason is not None
        params = self.request.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": self.output,
            **{field: self.given.get(field, default) for field, default in REPEATED.items()},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self.num_top,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": self.counted() if ended else None,
        }

    def counted(self) -> dict[str, Any]:
        """Return the numbers of tokens with the names of the Responses API."""
        reasoning = 0
        if self.output and self.output[0]["type"] == "reasoning":
            closed = self.close_id in self.ids
            reasoning = self.ids.index(self.close_id) + 1 if closed else len(self.ids)  # type: ignore[arg-type]
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.num_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": self.prompt_tokens + self.num_tokens,
        }


def name(prefix: str) -> str:
    """Return a new id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def written(document: Mapping[str, Any]) -> str:
    """Serialise a JSON object in one line."""
    return readable(one_line(json.dumps(document, ensure_ascii=False, separators=(",", ":"))))

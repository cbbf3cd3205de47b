"""Log-probabilities as OpenAI's objects: one form for texts, one for chats, and vLLM's for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from jaxspec.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput

LEAST = -9999.0  # JSON has no infinity; as in vLLM
Rows = Sequence[Mapping[int, Logprob]]


def number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def octets(entry: Logprob) -> list[int] | None:
    """None for a token that is no text by itself, such as a part of a character."""
    return None if "\ufffd" in text(entry) else list(text(entry).encode())


def of_text(rows: Rows, ids: Sequence[int], offset: int) -> Logprobs:
    """offset: characters of the tokens before."""
    chosen = [row[i] for i, row in zip(ids, rows, strict=False)]
    tokens = [text(entry) for entry in chosen]
    return Logprobs(
        tokens=tokens,
        token_logprobs=[number(entry) for entry in chosen],
        top_logprobs=[{text(e): number(e) for e in reversed(list(row.values()))} for row in rows],
        text_offset=list(itertools.accumulate(map(len, tokens), initial=offset))[:-1],
    )


def of_chat(output: CompletionOutput | StreamOutput, most: int) -> ChoiceLogprobs | None:
    """most: likeliest tokens that were asked for; the chosen one is among them or not."""
    if output.logprobs is None:
        return None
    content = []
    for i, row in zip(output.token_ids, output.logprobs, strict=False):
        best = sorted((e for e in row.values() if e.rank <= most), key=lambda entry: entry.rank)[:most]
        listed = [TopLogprob(token=text(e), logprob=number(e), bytes=octets(e)) for e in best]
        entry = row[i]
        content.append(
            ChatCompletionTokenLogprob(
                token=text(entry), logprob=number(entry), bytes=octets(entry), top_logprobs=listed
            )
        )
    return ChoiceLogprobs(content=content, refusal=None)


def of_prompt(output: RequestOutput) -> dict[str, Any]:
    """vLLM's prompt_logprobs, where they were asked for."""
    if output.prompt_logprobs is None:
        return {}
    entry = lambda e: {"logprob": number(e), "rank": e.rank, "decoded_token": e.decoded_token}
    described = lambda row: {str(i): entry(e) for i, e in row.items()}
    return {"prompt_logprobs": [None if row is None else described(row) for row in output.prompt_logprobs]}

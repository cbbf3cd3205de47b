"""Log-probabilities as OpenAI's objects: one form for texts, one for chats, and vLLM's for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.chat.chat_completion import ChoiceLogprobs
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
    found = Logprobs(
        tokens=tokens,
        token_logprobs=[number(entry) for entry in chosen],
        text_offset=list(itertools.accumulate(map(len, tokens), initial=offset))[:-1],
    )
    # A generator, which only the constructor would make a list of: nothing of it is kept in memory.
    found.top_logprobs = ({text(e): number(e) for e in reversed(list(row.values()))} for row in rows)  # type: ignore
    return found


def of_chat(output: CompletionOutput | StreamOutput, most: int) -> ChoiceLogprobs | None:
    """most: likeliest tokens that were asked for; the chosen one is among them or not."""
    if output.logprobs is None:
        return None
    found = ChoiceLogprobs.construct(refusal=None)
    found.content = chat_entries(output.token_ids, output.logprobs, most)  # type: ignore[assignment]
    return found


def chat_entries(ids: Sequence[int], rows: Rows, most: int) -> Iterator[dict[str, Any]]:
    """Yield each token's entry when it is written. All of them would take many times the memory of their text."""
    for i, row in zip(ids, rows, strict=False):
        best = sorted((e for e in row.values() if e.rank <= most), key=lambda entry: entry.rank)[:most]
        yield chat_entry(row[i]) | {"top_logprobs": [chat_entry(e) for e in best]}


def chat_entry(entry: Logprob) -> dict[str, Any]:
    return {"token": text(entry), "logprob": number(entry), "bytes": octets(entry)}


def of_prompt(output: RequestOutput) -> dict[str, Any]:
    """vLLM's prompt_logprobs, where they were asked for."""
    if output.prompt_logprobs is None:
        return {}
    entry = lambda e: {"logprob": number(e), "rank": e.rank, "decoded_token": e.decoded_token}
    described = lambda row: {str(i): entry(e) for i, e in row.items()}
    return {"prompt_logprobs": (None if row is None else described(row) for row in output.prompt_logprobs)}

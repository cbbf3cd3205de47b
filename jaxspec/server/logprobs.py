"""Log-probabilities as OpenAI's objects: one form for texts, one for chats, and vLLM's for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from jaxspec.api.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput

LEAST = -9999.0  # JSON has no infinity; as in vLLM
Rows = Sequence[Mapping[int, Logprob]]


def number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def octets(entry: Logprob) -> list[int] | None:
    """Return its bytes, or None for a token that the text leaves out."""
    return None if entry.token_bytes is None else list(entry.token_bytes)


def names(row: Mapping[int, Logprob]) -> dict[int, str]:
    """Return a name for each id of a row, each another one. The first, the chosen token, is named by its text. So are
    the others, but for parts of characters, named by their bytes, and texts that are taken, named by their ids."""
    found: dict[int, str] = {}
    for i, entry in row.items():
        name, data = text(entry), bytes(entry.token_bytes or ())
        if found and name.encode() != data and "\ufffd" in name:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        found[i] = f"token_id:{i}" if name in found.values() else name
    return found


def width(entry: Logprob) -> int:
    """Return how many characters of the text are this token's."""
    return 0 if entry.token_bytes is None else len(text(entry))


def of_text(rows: Rows, ids: Sequence[int], offset: int) -> tuple[Logprobs, int]:
    """offset: characters of the tokens before. Return the log-probabilities, and where the next token begins."""
    chosen = [row[i] for i, row in zip(ids, rows, strict=False)]
    *offsets, end = itertools.accumulate(map(width, chosen), initial=offset)
    logprobs = [number(entry) for entry in chosen]
    found = Logprobs(tokens=list(map(text, chosen)), token_logprobs=logprobs, text_offset=offsets)
    # A generator, which only the constructor would make a list of: nothing of it is kept in memory.
    found.top_logprobs = ({name: number(row[i]) for i, name in names(row).items()} for row in rows)  # type: ignore
    return found, end


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
        named = [(e, name) for e, name in zip(row.values(), names(row).values(), strict=True) if e.rank <= most]
        best = sorted(named, key=lambda each: each[0].rank)[:most]
        yield chat_entry(row[i], text(row[i])) | {"top_logprobs": [chat_entry(e, name) for e, name in best]}


def chat_entry(entry: Logprob, name: str) -> dict[str, Any]:
    return {"token": name, "logprob": number(entry), "bytes": octets(entry)}


def of_prompt(output: RequestOutput) -> dict[str, Any]:
    """vLLM's prompt_logprobs, where they were asked for."""
    if output.prompt_logprobs is None:
        return {}
    entry = lambda e: {"logprob": number(e), "rank": e.rank, "decoded_token": e.decoded_token}
    described = lambda row: {str(i): entry(e) for i, e in row.items()}
    return {"prompt_logprobs": (None if row is None else described(row) for row in output.prompt_logprobs)}

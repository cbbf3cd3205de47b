"""Conversion of log-probabilities to the HTTP API's forms: OpenAI's for completions and chats, vLLM's for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from jaxspec.api.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput
from jaxspec.server.echo import Echo

LEAST = -9999.0  # value that replaces smaller log-probabilities, as in vLLM, because JSON has no infinity
Rows = Sequence[Mapping[int, Logprob]]  # for each token of a text, a dict of Logprobs by token id
PromptRows = Sequence[Mapping[int, Logprob] | None]  # the same for a prompt, whose first token has None


def number(entry: Logprob) -> float:
    """Return the log-probability, or LEAST if it is smaller."""
    return max(entry.logprob, LEAST)


def text(entry: Logprob) -> str:
    """Return the token's text, or an empty string for a token without text."""
    return entry.decoded_token or ""


def octets(entry: Logprob) -> list[int] | None:
    """Return the token's bytes, or None for a token that is left out of the text, such as a stop token."""
    return None if entry.token_bytes is None else list(entry.token_bytes)


def names(row: Mapping[int, Logprob]) -> dict[int, str]:
    """Return a distinct name for each token id of one position, because OpenAI's form identifies tokens by name.

    row: Logprobs by token id; the first id is the chosen token.

    A token is named by its text. A token after the first is named by its bytes if these hold an incomplete character.
    A token whose name an earlier token has is named by its id.
    """
    found: dict[int, str] = {}
    for i, entry in row.items():
        name = text(entry)
        data = bytes(entry.token_bytes or ())
        if found and name.encode() != data and "\ufffd" in name:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        found[i] = f"token_id:{i}" if name in found.values() else name
    return found


def width(entry: Logprob) -> int:
    """Return the number of characters that the token adds to the text."""
    return 0 if entry.token_bytes is None else len(text(entry))


def of_text(rows: Rows, ids: Sequence[int], offset: int) -> tuple[Logprobs, int]:
    """Return the log-probabilities of a completion, or of a streamed piece, in OpenAI's form for completions.

    rows: for each token, Logprobs by token id.
    ids: chosen token ids.
    offset: index in the completion's text at which the first token begins, in characters.

    Returns: the log-probabilities, and the index at which the last token ends.
    """
    chosen = [row[i] for i, row in zip(ids, rows, strict=False)]
    *offsets, end = itertools.accumulate(map(width, chosen), initial=offset)
    logprobs = [number(entry) for entry in chosen]
    found = Logprobs(tokens=list(map(text, chosen)), token_logprobs=logprobs, text_offset=offsets)
    # Set after construction, because the constructor would turn the generator into a list, which takes memory.
    found.top_logprobs = (named(row) for row in rows)  # type: ignore[assignment]
    return found, end


def named(row: Mapping[int, Logprob]) -> dict[str, float]:
    """Return the log-probabilities at one position by the tokens' names."""
    return {name: number(row[i]) for i, name in names(row).items()}


def with_prompt(output: Logprobs, echo: Echo, rows: PromptRows, num_top: int) -> Logprobs:
    """Return the log-probabilities of an output after those of its prompt, in OpenAI's form for completions.

    The prompt's first token has null in the place of log-probabilities.

    rows: log-probabilities of the prompt.
    num_top: number of most probable tokens to list at each position.
    """
    scored = [(i, row) for i, row in zip(echo.ids, rows, strict=False) if row is not None]
    chosen = [number(row[i]) for i, row in scored]
    found = Logprobs.construct(
        tokens=[*echo.tokens, *(output.tokens or ())],
        token_logprobs=[None, *chosen, *(output.token_logprobs or ())],
        text_offset=[*echo.offsets, *(output.text_offset or ())],
    )
    tops = (named(most_probable(row, num_top)) for _, row in scored)
    every = itertools.chain([None], tops, output.top_logprobs or ())
    found.top_logprobs = (row for row in every)  # type: ignore[assignment]  # pydantic writes generators only
    return found


def most_probable(row: Mapping[int, Logprob], num_top: int) -> dict[int, Logprob]:
    """Return the entries of the chosen token, which is the first, and of the num_top most probable ones."""
    return {i: entry for at, (i, entry) in enumerate(row.items()) if not at or entry.rank <= num_top}


def of_chat(output: CompletionOutput | StreamOutput, num_top: int) -> ChoiceLogprobs | None:
    """Return the log-probabilities of a chat's output, or of a streamed piece, in OpenAI's form for chats.

    num_top: number of most probable tokens to list at each position.

    Returns: None if the request did not ask for log-probabilities.
    """
    if output.logprobs is None:
        return None
    found = ChoiceLogprobs.construct(refusal=None)
    found.content = chat_entries(output.token_ids, output.logprobs, num_top)  # type: ignore[assignment]
    return found


def chat_entries(ids: Sequence[int], rows: Rows, num_top: int) -> Iterator[dict[str, Any]]:
    """Yield each token's entry of a chat's log-probabilities.

    A list of all entries would take many times the memory of the JSON text.

    ids: chosen token ids.
    rows: for each token, Logprobs by token id.
    num_top: number of most probable tokens to list at each position.
    """
    for i, row in zip(ids, rows, strict=False):
        named = [(e, name) for e, name in zip(row.values(), names(row).values(), strict=True) if e.rank <= num_top]
        top = sorted(named, key=lambda each: each[0].rank)[:num_top]
        yield chat_entry(row[i], text(row[i])) | {"top_logprobs": [chat_entry(e, name) for e, name in top]}


def chat_entry(entry: Logprob, name: str) -> dict[str, Any]:
    """Return a token's log-probability in OpenAI's form for chats. name: the token's text or other name."""
    return {"token": name, "logprob": number(entry), "bytes": octets(entry)}


def of_prompt(output: RequestOutput, num_top: int | None) -> dict[str, Any]:
    """Return a dict with vLLM's field prompt_logprobs, or an empty dict if the request did not ask for it.

    num_top: number of most probable tokens to list at each position, or None.
    """
    if num_top is None:
        return {}
    rows = output.prompt_logprobs or ()
    return {"prompt_logprobs": (None if row is None else prompt_row(most_probable(row, num_top)) for row in rows)}


def prompt_row(row: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    """Return the log-probabilities at one prompt token in vLLM's form: a dict by token id."""
    return {str(i): {"logprob": number(e), "rank": e.rank, "decoded_token": e.decoded_token} for i, e in row.items()}

"""Checks and encoding of prompts, in every form that callers may give, each with its own sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import ids as checked_ids
from jaxspec.common.values import unknown
from jaxspec.grammars.automaton import Automaton
from jaxspec.options.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = ("prompt", "prompt_token_ids")  # keys of a prompt that is given as a mapping
BYTES = bytes | bytearray | memoryview  # types that are iterables of numbers, but not lists of token ids


@dataclasses.dataclass(frozen=True)
class PromptRequest:
    """One prompt, checked and encoded for the engine.

    index: number of the prompt among the caller's prompts, from 0.
    text: the prompt's text; None if it was given as ids.
    ids: the prompt's token ids.
    params: sampling parameters of this prompt.
    bad_words: token ids of each of params.bad_words, at the start of a text and after a space.
    request_id: name of the request, which its result has too.
    automaton: future automaton of params.structured_outputs; None if they are None.
    """

    index: int
    text: str | None
    ids: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    request_id: str = ""
    automaton: Future[Automaton] | None = None

    def built_automaton(self) -> Automaton | None:
        """Return the automaton, or None. Wait while it is built, and raise UserError if it cannot be."""
        return self.automaton.result() if self.automaton else None


AnyPrompt = Prompt | PromptRequest


def prompt_requests(tokenizer: Any, prompts: Any, sampling_params: Any) -> list[PromptRequest]:
    """Return prompts and sampling parameters, in any form that LLM.generate takes, as PromptRequests.

    Raises: UserError for any other form. The message names the index of the prompt that is wrong.
    """
    listed = as_list(prompts)
    params = spread(sampling_params, len(listed))
    words = {p: named(i, bad_word_ids, tokenizer, p.bad_words) for i, p in enumerate(params) if p.bad_words}
    return [
        PromptRequest(i, text_of(prompt), named(i, encode, tokenizer, prompt), p, words.get(p, ()))
        for i, (prompt, p) in enumerate(zip(listed, params, strict=True))
    ]


def is_number(prompt: Any) -> bool:
    """Return whether an element of a list is a token id rather than a prompt.

    The number of dimensions is tested too, because arrays have __index__ like integers.
    """
    return hasattr(prompt, "__index__") and getattr(prompt, "ndim", 0) == 0


def as_list(prompts: Any) -> list[Prompt]:
    """Return one prompt, or several, as a list of prompts. Raise UserError for bytes, and for what is not iterable."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, BYTES):
        raise UserError(f"{quoted(prompts)} is not a prompt: decode bytes to a string")
    if not isinstance(prompts, Iterable):
        raise UserError(f"{quoted(prompts)} is not a prompt: give a string, a list of strings or lists of token ids")
    prompts = list(prompts)
    return [prompts] if prompts and all(map(is_number, prompts)) else prompts


def spread(params: Any, count: int) -> list[SamplingParams]:
    """Return a list with one SamplingParams for each of `count` prompts.

    params: None for defaults, a SamplingParams for all prompts, or a list with one for each.

    Raises: UserError for anything else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise UserError(f"sampling_params={quoted(params)}: give a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise UserError(f"{len(params)} SamplingParams for {count} prompts: give one for all, or one each")
    return list(params)


def named(index: int, call: Any, *args: Any) -> Any:
    """Return the result of the function `call`. If it raises UserError, put the prompt's index before its message."""
    try:
        return call(*args)
    except UserError as error:
        raise error.within(f"prompt {index}: ") from error


def text_of(prompt: Prompt) -> str | None:
    """Return a prompt's text, or None if the prompt has only token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def readable(text: Any, where: str = "") -> str:
    """Return the text unchanged if it is valid Unicode.

    where: beginning of the error message.

    Raises: UserError if the text contains half of a surrogate pair, which no tokenizer reads.
    """
    known: str = text
    try:
        known.encode()
    except UnicodeError:
        message = f"{where}{quoted(text)} is not valid Unicode, because it holds half of a surrogate pair: remove it"
        raise UserError(message) from None
    return known


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """Return a prompt's token ids. Raise UserError for anything that is not a prompt."""
    for name in prompt if isinstance(prompt, Mapping) else ():
        if name not in FORMS:
            raise unknown(str(name), "a prompt", FORMS, "key")
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(prompt, str) or (ids is None and text_of(prompt) is not None):
        return list(tokenizer.encode(readable(text_of(prompt))))
    if not isinstance(ids, Iterable) or isinstance(ids, str | Mapping | BYTES):
        raise UserError(
            f"{quoted(prompt)} is not a prompt: give a string, a list of token ids, or a dict with "
            "'prompt_token_ids' or 'prompt'"
        )
    return list(checked_ids("token id", ids))


def bad_word_ids(tokenizer: Any, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word.

    A word is encoded at the beginning of a text and after a space. The second form is added only if it has the same
    number of ids and begins with another id. vLLM does the same.

    Raises: UserError for a word without tokens or with invalid Unicode.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        text = readable(word, "bad_words: ").lstrip()
        first = tuple(tokenizer.encode(text, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {text}", add_special_tokens=False))
        if not first:
            raise UserError(f"bad_words: {word!r} has no tokens: leave it out")
        found.append(first)
        if spaced[0] != first[0] and len(spaced) == len(first):
            found.append(spaced)
    return tuple(found)

"""What a caller gives -> asks: prompts as token ids, each with its own checked parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.errors import UserError, said
from jaxspec.options import ids as checked_ids
from jaxspec.options import unknown
from jaxspec.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
FORMS = ("prompt", "prompt_token_ids")  # keys of a mapping
BYTES = bytes | bytearray | memoryview  # iterables of numbers that are no token ids


@dataclasses.dataclass(frozen=True)
class Ask:
    """One prompt, ready for the engine.

    index: its place among the caller's prompts.
    text: None where ids were given.
    bad_words: the ids of each of params.bad_words, in its two forms.
    request_id: the name that the result has.
    """

    index: int
    text: str | None
    ids: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    request_id: str = ""


def asks(tokenizer: Any, prompts: Any, sampling_params: Any) -> list[Ask]:
    """Prompts and parameters in any of the forms that LLM.generate takes. Raises UserError, with the prompt's index,
    for one that is none of them."""
    listed = as_list(prompts)
    params = spread(sampling_params, len(listed))
    words = {p: named(i, bad_word_ids, tokenizer, p.bad_words) for i, p in enumerate(params) if p.bad_words}
    return [
        Ask(i, text_of(prompt), named(i, encode, tokenizer, prompt), p, words.get(p, ()))
        for i, (prompt, p) in enumerate(zip(listed, params, strict=True))
    ]


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, BYTES):
        raise UserError(f"{prompts!r:.80} is no prompt: decode bytes to a string")
    if not isinstance(prompts, Iterable):
        raise UserError(f"{prompts!r:.80} is no prompt: give a string, a list of strings or lists of token ids")
    prompts = list(prompts)
    number = lambda p: hasattr(p, "__index__") and getattr(p, "ndim", 0) == 0  # arrays have it, too
    return [prompts] if prompts and all(map(number, prompts)) else prompts


def spread(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise UserError(f"sampling_params={params!r:.80}: give a SamplingParams, or a list with one for each prompt")
    if len(params) != count:
        raise UserError(f"{len(params)} SamplingParams for {count} prompts: give one for all, or one each")
    return list(params)


def named(index: int, call: Any, *args: Any) -> Any:
    """call(*args), with the prompt's index in front of what it refuses."""
    try:
        return call(*args)
    except UserError as error:
        raise error.within(f"prompt {index}: ") from error


def text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def readable(text: Any, where: str = "") -> str:
    """The text; where: what the refusal begins with. Raises UserError where it holds half of a surrogate pair, which no
    tokenizer reads."""
    try:
        text.encode()
    except UnicodeError:
        raise UserError(f"{where}{text!r:.80} is no Unicode text: it holds half of a surrogate pair") from None
    return text


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """The prompt's token ids."""
    for name in prompt if isinstance(prompt, Mapping) else ():
        if name not in FORMS:
            raise unknown(str(name)[:80], "a prompt", FORMS, "key")
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(prompt, str) or (ids is None and text_of(prompt) is not None):
        return list(tokenizer.encode(readable(text_of(prompt))))
    if not isinstance(ids, Iterable) or isinstance(ids, str | Mapping | BYTES):
        raise UserError(
            f"{prompt!r:.80} is no prompt: give a string, a list of token ids, or a dict with 'prompt_token_ids' or "
            "'prompt'"
        )
    return list(checked_ids("token id", ids))


def rendered(tokenizer: Any, messages: Any, given: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """A conversation as a prompt of token ids, by the model's chat template, which writes its own BOS; given: what it
    reads besides. Raises UserError where there is no template, or it does not take them."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError("this model has no chat template: use generate with a plain prompt")
    named = {} if given is None else given
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise UserError(f"chat_template_kwargs={named!r:.80} must map names to values")
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in named:
        if name in own or not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise UserError(f"chat_template_kwargs: {name!r:.80} is nothing that the model's chat template is told")
    try:
        text = tokenizer.apply_chat_template(flattened(messages), tokenize=False, add_generation_prompt=True, **named)
    except Exception as error:  # the template is a program of the model's, and raises what it likes
        raise UserError(f"{messages!r:.80} does not fit the model's chat template: {said(error)}") from error
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(readable(text), add_special_tokens=False)}


def flattened(messages: Iterable[Any]) -> list[Any]:
    """The messages, their contents as text: parts of it are joined by line breaks, as in vLLM. Raises UserError for a
    content that is none: templates would show it as Python does."""
    return [
        {**m, "content": content_of(i, m.get("content"))} if isinstance(m, Mapping) else m
        for i, m in enumerate(messages)
    ]


def content_of(index: int, content: Any) -> str:
    parts = content if isinstance(content, Sequence) and not isinstance(content, str | BYTES) else [content]
    texts: list[Any] = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else p for p in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"messages[{index}] has content={content!r:.80}: give a string, or a list of text parts")
    return "\n".join(texts)


def bad_word_ids(tokenizer: Any, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it reads at the beginning of a text and, where that is another token and as many of them, as it
    reads after a space. As vLLM does it."""
    found: list[tuple[int, ...]] = []
    for word in words:
        text = readable(word, "bad_words: ").lstrip()
        first, spaced = (tuple(tokenizer.encode(space + text, add_special_tokens=False)) for space in ("", " "))
        if not first:
            raise UserError(f"bad_words: {word!r} has no tokens: give words that have")
        found.append(first)
        if spaced[0] != first[0] and len(spaced) == len(first):
            found.append(spaced)
    return tuple(found)

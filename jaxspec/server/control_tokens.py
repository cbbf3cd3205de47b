"""Refusal of requests whose texts contain a control token of the model, such as <|im_end|>.

A tokenizer would encode these characters as the control token, even if a client wrote them as part of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.api.prompts import readable
from jaxspec.common.errors import UserError
from jaxspec.server.fields import RequestFields


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the text of each token that the tokenizer marks as special, by token id."""
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def refuse(tokenizer: Any, control: Mapping[int, str], request: RequestFields) -> None:
    """Raise UserError, which names the field, if a text of the request contains one of the control tokens."""
    for where, text in texts(request):
        token = held(tokenizer, control, text)
        if token is not None:
            message = f"{where} holds {token!r}, a control token of the model: this server refuses it in texts"
            raise UserError(message, param=where)


def texts(request: RequestFields) -> Iterator[tuple[str, str]]:
    """Yield (field, text) for every text that may become part of a prompt. Prompts of token ids have no text."""
    for prompt in request.prompts or ():
        if isinstance(prompt, str):
            yield "prompt", prompt
    for i, message in enumerate(request.messages):
        for name, value in message.items():
            if name != "role":
                yield from texts_in(f"messages[{i}].{name}", value)
    yield from texts_in("chat_template_kwargs", request.chat.get("chat_template_kwargs"))
    yield from texts_in("tools", request.chat.get("tools"))


def texts_in(where: str, given: Any) -> Iterator[tuple[str, str]]:
    """Yield (where, text) for every text in a JSON value."""
    left = [given]
    while left:  # a loop instead of recursion, because JSON may be nested more deeply than Python can recurse
        value = left.pop()
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


def held(tokenizer: Any, control: Mapping[int, str], text: str) -> str | None:
    """Return the first control token in a text, or None.

    An unknown character, which the tokenizer encodes as its unknown token, does not count as a control token.
    """
    for i in tokenizer.encode(readable(text), add_special_tokens=False):
        token = control.get(i)
        if token is not None and (i != tokenizer.unk_token_id or token in text):
            return token
    return None

"""Refusal of texts that hold a control token, such as <|im_end|>. A tokenizer encodes it as a control token even where
a client wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.api.prompts import readable
from jaxspec.common.errors import UserError
from jaxspec.server.fields import RequestFields


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that the tokenizer marks as special, by id."""
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def refuse(tokenizer: Any, control: Mapping[int, str], request: RequestFields) -> None:
    """Raise UserError, which names the field, if a text of the request holds one of these tokens."""
    for where, text in texts(request):
        token = held(tokenizer, control, text)
        if token is not None:
            message = f"{where} holds {token!r}, a control token of the model: this server takes none in a text"
            raise UserError(message, param=where)


def texts(request: RequestFields) -> Iterator[tuple[str, str]]:
    """Yield (field, text) for every text of the request that may become part of a prompt. Token ids have no text."""
    for prompt in request.prompts or ():
        if isinstance(prompt, str):
            yield "prompt", prompt
    for i, message in enumerate(request.messages):
        for name, text in message.items():
            if name != "role":
                yield f"messages[{i}].{name}", text
    left: list[Any] = [request.chat.get("chat_template_kwargs")]
    while left:  # a loop, since JSON may be nested more deeply than Python recurses
        value = left.pop()
        if isinstance(value, str):
            yield "chat_template_kwargs", value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


def held(tokenizer: Any, control: Mapping[int, str], text: str) -> str | None:
    """Return the first control token of the encoded text, or None. An unknown character, which is encoded as the
    unknown token, does not count."""
    for i in tokenizer.encode(readable(text), add_special_tokens=False):
        token = control.get(i)
        if token is not None and (i != tokenizer.unk_token_id or token in text):
            return token
    return None

"""Control tokens in texts of clients, such as <|im_end|>: a tokenizer reads them as tokens, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.api.prompts import readable
from jaxspec.common.errors import UserError
from jaxspec.server.fields import Wish


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Id -> token, of those that the tokenizer marks as special."""
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def refuse(tokenizer: Any, control: Mapping[int, str], wish: Wish) -> None:
    """Raises UserError, with its place, for a text of the request that holds one of these tokens."""
    for where, text in texts(wish):
        if (token := held(tokenizer, control, text)) is not None:
            message = f"{where} holds {token!r}, a control token of the model: this server takes none in a text"
            raise UserError(message, param=where)


def texts(wish: Wish) -> Iterator[tuple[str, str]]:
    """(place, text) of all that the request brings into a prompt. Prompts of token ids have no text."""
    yield from (("prompt", prompt) for prompt in wish.prompts or () if isinstance(prompt, str))
    for i, message in enumerate(wish.messages):
        yield from ((f"messages[{i}].{name}", text) for name, text in message.items() if name != "role")
    left: list[Any] = [wish.chat.get("chat_template_kwargs")]
    while left:  # not by recursion: JSON may be nested deeply
        value = left.pop()
        if isinstance(value, str):
            yield "chat_template_kwargs", value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


def held(tokenizer: Any, control: Mapping[int, str], text: str) -> str | None:
    """The first of these tokens that the text is encoded to. Characters that are unknown to the tokenizer are none."""
    for i in tokenizer.encode(readable(text), add_special_tokens=False):
        token = control.get(i)
        if token is not None and (i != tokenizer.unk_token_id or token in text):
            return token
    return None

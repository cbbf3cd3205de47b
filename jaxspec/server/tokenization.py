"""Token ids of texts and chats, and texts of token ids: vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Send

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.detokenizer import Detokenizer
from jaxspec.api.prompts import readable
from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag, unknown
from jaxspec.common.values import ids as checked_ids
from jaxspec.server.admitted import Admitted, send_document
from jaxspec.server.fields import RequestFields, required
from jaxspec.server.gate import Gate
from jaxspec.server.lines import one_line
from jaxspec.server.offload import PROMPTS, offload
from jaxspec.server.prepared import SHORT, template_call
from jaxspec.server.refusal import Refusal, refusal_for

OWN = ("add_special_tokens", "return_token_strs")  # fields of /tokenize that requests for text do not have
TEXT = ("model", "prompt")
CHAT = ("model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
TOKENS = ("model", "tokens")
# Function that parses the fields of TEXT or CHAT as those of a request for text. Its argument `chat` says which.
Parse = Callable[..., RequestFields]
Work = Callable[[], dict[str, Any]]  # function that returns the answer


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """The checked fields of a request to tokenise.

    request: the text or chat, as a request for text has it.
    add_special_tokens: whether the tokenizer adds its tokens, such as a BOS.
    return_token_strs: whether the answer has the tokenizer's name of each token.
    """

    request: RequestFields
    add_special_tokens: bool
    return_token_strs: bool


def tokenize_fields(body: Mapping[str, Any], parse: Parse, model: str) -> Tokenize:
    """Parse and check the body of a request to tokenise. Raise Refusal, which names the field.

    parse: see Parse.
    model: name of the served model, which the request may leave out.
    """
    given = {name: value for name, value in body.items() if value is not None}
    chat = "messages" in given
    check_names(given, (*OWN, *(CHAT if chat else TEXT)))
    try:
        # A chat template writes the special tokens itself.
        flags = {name: flag(name, given.pop(name, name == "add_special_tokens" and not chat)) for name in OWN}
    except UserError as error:
        raise refusal_for(error, "", OWN) from None
    request = parse({"model": model} | given, chat=chat)
    if not chat and not isinstance(given["prompt"], str):
        raise Refusal(400, f"prompt={quoted(given['prompt'])} must be a string", param="prompt")
    return Tokenize(request, **flags)


def detokenize_fields(body: Mapping[str, Any], vocab_size: int, check_model: Callable[[Any], None]) -> list[int]:
    """Return the token ids in the body of a request to detokenise. Raise Refusal, which names the field.

    check_model: function that raises Refusal for the name of a model that is not served.
    """
    given = {name: value for name, value in body.items() if value is not None}
    check_names(given, TOKENS)
    if "model" in given:
        check_model(given["model"])
    try:
        ids = checked_ids("tokens", required(given, "tokens"))
    except UserError as error:
        raise Refusal(400, str(error), param="tokens") from None
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise Refusal(400, f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}", param="tokens")
    return list(ids)


def check_names(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise Refusal for an unknown field."""
    for name in given:
        if name not in known:
            message = str(unknown(name, "the request", known, "field"))
            raise Refusal(400, message, param=name[:80], code="unknown_parameter")


class Tokenization(Admitted):
    """The response to a request to tokenise or detokenise. It takes the place of one sample.

    fields: checked fields of the request.
    room: largest number of tokens that a prompt and its output may have together.
    """

    def __init__(self, llm: AsyncLLM, gate: Gate, fields: Tokenize | list[int], room: int, seconds: float) -> None:
        super().__init__(gate, 1, seconds)
        self.llm = llm
        self.fields = fields
        self.room = room

    async def work(self, send: Send) -> None:
        tokenizer = self.llm.llm.tokenizer
        make: Work
        if isinstance(self.fields, list):
            size = len(self.fields)
            make = functools.partial(detokenized, tokenizer, self.fields)
        else:
            request = self.fields.request
            text: Any
            try:
                if request.prompts is None:
                    text = await self.llm.templates.text(await template_call(self.llm, request))
                else:
                    (text,) = request.prompts
            except UserError as error:
                raise refusal_for(error, request.source, default=request.source) from None
            size = len(text)
            make = functools.partial(tokenized, tokenizer, self.fields, text, self.room)
        await send_document(send, await offload(size > SHORT, written, make, threads=PROMPTS))


def tokenized(tokenizer: Any, fields: Tokenize, text: str, room: int) -> dict[str, Any]:
    """Return the answer to a request to tokenise. Raise Refusal for a text with invalid Unicode.

    room: largest number of tokens that a prompt and its output may have together.
    """
    try:
        ids = list(tokenizer.encode(readable(text), add_special_tokens=fields.add_special_tokens))
    except UserError as error:
        raise Refusal(400, str(error), param=fields.request.source) from None
    names = tokenizer.convert_ids_to_tokens(ids) if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": names}


def detokenized(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    """Return the answer to a request to detokenise: the text with special tokens."""
    return {"prompt": Detokenizer(tokenizer, skip_special_tokens=False).finish(ids, include_stop=False)}


def written(make: Work) -> bytes:
    """Return an answer as JSON."""
    return one_line(json.dumps(make(), ensure_ascii=False, separators=(",", ":"))).encode()

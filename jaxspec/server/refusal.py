"""Errors that clients receive, in OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import Response
from openai.types import ErrorObject

from jaxspec.common.errors import UserError
from jaxspec.server.lines import one_line

# Status -> OpenAI's name for that type of error.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}
# Beginning of an error message -> the field at fault.
PHRASES = {
    "the prompt": "prompt",
    "token id": "prompt",
    "stop token id": "stop_token_ids",
    "allowed token id": "allowed_token_ids",
    "bad word": "bad_words",
    "chat_template_kwargs": "chat_template_kwargs",
}


class Refusal(Exception):
    """The reason why a request is not served.

    status: HTTP status.
    message: one line for the client.
    param: field at fault.
    code: OpenAI's code of the error.
    headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def as_dict(self) -> dict[str, Any]:
        """Return {"error": {"message", "type", "param", "code"}}."""
        kind = KINDS.get(self.status, "invalid_request_error")
        error = ErrorObject(message=readable(self.message), type=kind, param=self.param, code=self.code)
        if self.param is not None:
            error.param = readable(self.param)
        return {"error": error.model_dump(exclude_unset=True)}

    def as_json(self) -> str:
        return one_line(json.dumps(self.as_dict(), ensure_ascii=False, separators=(",", ":")))

    def response(self) -> Response:
        return Response(self.as_json(), self.status, headers=self.headers, media_type="application/json")


def readable(text: str) -> str:
    """Escape halves of surrogate pairs, which JSON may contain and which cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()


def refusal_for(error: UserError, source: str, given: Collection[str] = (), default: str | None = None) -> Refusal:
    """Return the refusal for an error of jaxspec.

    Its param is that of the error, or the field with which the error's message begins.

    source: field of the request that holds the prompts or messages.
    given: names of the request's fields.
    default: its param if both give none.
    """
    message = str(error).removeprefix("prompt 0: ")  # each call has one prompt, so its index means nothing to a client
    first = re.match(r"\w*", message)[0]  # type: ignore[index]
    named = first if first in given else default
    param = error.param or next((field for phrase, field in PHRASES.items() if message.startswith(phrase)), named)
    if param == "prompt":
        param = source
    return Refusal(400, message, param=param, code=error.code)

"""Errors that the server sends to clients, in OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import Response
from openai.types import ErrorObject

from jaxspec.common.errors import UserError
from jaxspec.server.lines import one_line

# HTTP status -> OpenAI's name for that type of error. Any other status has the type invalid_request_error.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}
# Beginning of a UserError's message -> request field at fault.
PHRASES = {
    "the prompt": "prompt",
    "token id": "prompt",
    "stop token id": "stop_token_ids",
    "allowed token id": "allowed_token_ids",
    "bad word": "bad_words",
    "chat_template_kwargs": "chat_template_kwargs",
}


class Refusal(Exception):
    """The error that a client receives for a request that is not served.

    status: HTTP status.
    message: one line that describes the error.
    param: name of the request field at fault, if known.
    code: OpenAI's code of the error.
    headers: additional HTTP headers of the response.
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
        """Return the error as OpenAI's object {"error": {"message", "type", "param", "code"}}."""
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
    """Escape halves of surrogate pairs. JSON may contain them, but UTF-8 cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


def refusal_for(error: UserError, source: str, given: Collection[str] = (), default: str | None = None) -> Refusal:
    """Return the error for a client whose request caused a UserError.

    The field at fault (`param`) is the error's own, or the one with which the error's message begins.

    source: name of the request field that holds the prompts or messages; `param` is this name instead of "prompt".
    given: names of the request's fields or of its sampling parameters, with one of which the message may begin.
    default: field at fault if neither the error nor its message names one.
    """
    # The server prepares each prompt in its own call, so every prompt has the index 0.
    message = str(error).removeprefix("prompt 0: ")
    first = re.match(r"\w*", message)[0]  # type: ignore[index]
    named = first if first in given else default
    param = error.param or next((field for phrase, field in PHRASES.items() if message.startswith(phrase)), named)
    if param == "prompt":
        param = source
    return Refusal(400, message, param=param, code=error.code)

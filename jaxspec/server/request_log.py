"""The request log: a line on standard error for each POST request, without the texts of request and answer."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.common.progress import write_line
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.server.answers import Base
from jaxspec.server.refusal import Refusal

LONGEST = 100  # largest number of characters of a request's path that are logged
DEFAULTS = SamplingParams()


class RequestLog:
    """ASGI middleware that writes the request log.

    The application puts the `answer` or the `refusal` of a request into the request's state as soon as it exists.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        started = time.perf_counter()
        status = 500
        first: float | None = None  # time at which the response began

        async def watch(message: Message) -> None:
            nonlocal first, status
            if message["type"] == "http.response.start":
                first = time.perf_counter()
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            state["refusal"] = error
            raise
        finally:
            fields = {"status": status, **described(state.get("answer"), state.get("refusal"), status)}
            if first is not None and fields.get("stream"):
                fields["first_seconds"] = f"{first - started:.3f}"
            fields["seconds"] = f"{time.perf_counter() - started:.3f}"
            listed = " ".join(f"{name}={value}" for name, value in fields.items())
            with contextlib.suppress(OSError):  # raised if standard error is closed
                write_line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} POST {scope['path'][:LONGEST]!a} {listed}")


def described(answer: Base | None, refusal: Exception | None, status: int) -> dict[str, Any]:
    """Return the fields of a request's log line: how the request ended, its id, token counts and sampling options.

    answer: answer of a request for text; None for another request.
    """
    if answer is None:
        return {"ended": "done" if status == 200 and refusal is None else ending(refusal)}
    request, reasons = answer.request, answer.reasons
    complete = reasons.total() == request.samples and refusal is None
    listed = ",".join(f"{reason}:{count}" for reason, count in reasons.items())
    return {
        "ended": listed if complete else ending(refusal),
        "id": answer.id,
        "stream": request.stream,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.num_tokens,
        **sampling(request.params),
    }


def ending(refusal: Exception | None) -> str:
    """Return a word for the way in which a request without a complete answer ended."""
    if refusal is None:
        return "client_left"
    if isinstance(refusal, Refusal):
        return refusal.code or "refused"
    return type(refusal).__name__


def sampling(params: SamplingParams) -> dict[str, Any]:
    """Return max_tokens and the sampling options that differ from their defaults.

    A list is replaced by its length in brackets, because it may contain text of the client.
    """
    found = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != getattr(DEFAULTS, field.name) or field.name == "max_tokens":
            found[field.name] = f"[{len(value)}]" if isinstance(value, tuple) else value
    return found

"""The request log: a line on standard error for each request that asks for text, with none of the text itself."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.common.progress import say
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.server.answers import Base
from jaxspec.server.refusal import Refusal

LONGEST = 100  # characters of a path
PLAIN = SamplingParams()


class RequestLog:
    """ASGI middleware. The application leaves the request's `answer` and `refusal` in its state, where it has them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        started, status = time.perf_counter(), 500
        first: float | None = None

        async def sent(message: Message) -> None:
            nonlocal first, status
            if message["type"] == "http.response.start":
                first, status = time.perf_counter(), message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception as error:
            state["refusal"] = error
            raise
        finally:
            fields = {"status": status, **described(state.get("answer"), state.get("refusal"))}
            if first is not None and fields.get("stream"):
                fields["first_seconds"] = f"{first - started:.3f}"
            fields["seconds"] = f"{time.perf_counter() - started:.3f}"
            listed = " ".join(f"{name}={value}" for name, value in fields.items())
            with contextlib.suppress(OSError):  # nobody reads standard error any more
                say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} POST {scope['path'][:LONGEST]!a} {listed}")


def described(answer: Base | None, refusal: Exception | None) -> dict[str, Any]:
    """The fields of a request's line: how it ended, its id, tokens and sampling options."""
    if answer is None:
        return {"ended": ending(refusal)}
    samples, reasons = answer.wish.samples, answer.reasons
    whole = ",".join(f"{reason}:{count}" for reason, count in reasons.items())
    return {
        "ended": whole if reasons.total() == samples and refusal is None else ending(refusal),
        "id": answer.id,
        "stream": answer.wish.stream,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.num_tokens,
        **sampling(answer.wish.params),
    }


def ending(refusal: Exception | None) -> str:
    """Name the end of a request without a whole answer."""
    if refusal is None:
        return "client_left"
    return refusal.code or "refused" if isinstance(refusal, Refusal) else type(refusal).__name__


def sampling(params: SamplingParams) -> dict[str, Any]:
    """The options that are not at their defaults; of lists, which may hold text, the number of entries."""
    found = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != getattr(PLAIN, field.name) or field.name == "max_tokens":
            found[field.name] = f"[{len(value)}]" if isinstance(value, tuple) else value
    return found

"""Errors of Ray Serve's HTTP proxy in OpenAI's form. By itself it answers in plain text, and where a replica dies it
says nothing: clients see `500 Internal Server Error`, or a stream that breaks off.

Ray's proxies load `middlewares` where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it in the environment that Ray
is started in.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.refusal import Refusal

RAYS_OWN = "/-/"  # its health and routes


def middlewares() -> list[Middleware]:
    return [Middleware(InOpenAIsForm)]


class InOpenAIsForm:
    """ASGI middleware: an answer in plain text becomes an error object, none at all an error, and a broken stream of
    events ends with an error event."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(RAYS_OWN):
            return await self.app(scope, receive, send)
        start: Message | None = None
        plain, whole = bytearray(), False

        async def sent(message: Message) -> None:
            nonlocal start, whole
            if message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                whole = not message.get("more_body", False)
            if start is None or not is_plain(start):
                await send(message)
            else:
                plain.extend(message.get("body", b""))

        await self.app(scope, receive, sent)
        ended = Refusal(503, "the replica ended before it had answered this request: ask again", code="replica_ended")
        if start is None:
            await ended.response()(scope, receive, send)
        elif is_plain(start):
            again = header(start, b"retry-after")
            headers = {"Retry-After": again.decode()} if again else None
            told = Refusal(start["status"], plain.decode(errors="replace"), headers=headers)
            await told.response()(scope, receive, send)
        elif not whole and header(start, b"content-type").startswith(b"text/event-stream"):
            await send({"type": "http.response.body", "body": f"data: {ended.as_json()}\n\n".encode()})


def header(start: Message, name: bytes) -> bytes:
    return dict(start["headers"]).get(name, b"")


def is_plain(start: Message) -> bool:
    """Whether it is the proxy's own error: those of the application are JSON."""
    return start["status"] >= 400 and not header(start, b"content-type").startswith(b"application/json")

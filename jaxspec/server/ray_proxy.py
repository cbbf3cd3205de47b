"""Middleware for Ray Serve's HTTP proxy that gives the proxy's own errors OpenAI's form.

Without it the proxy answers in plain text: when a replica dies, the replica's clients receive `500 Internal Server
Error` or a stream that breaks off.

Ray's proxies load the function `middlewares` of this file if the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names that function where Ray is started.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.server.refusal import Refusal

RAYS_OWN = "/-/"  # prefix of the proxy's own paths, such as its health check and its list of routes


def middlewares() -> list[Middleware]:
    """Return the middleware for Ray's proxy, which calls this function at its start."""
    return [Middleware(InOpenAIsForm)]


class InOpenAIsForm:
    """ASGI middleware that reports the proxy's errors in OpenAI's form.

    An error in plain text becomes a JSON error object. A request to which the application gives no response gets an
    error with status 503. A stream of events that breaks off ends with an error event.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(RAYS_OWN):
            return await self.app(scope, receive, send)
        start: Message | None = None
        plain = bytearray()  # body of a plain-text error
        complete = False

        async def intercept(message: Message) -> None:
            nonlocal start, complete
            if message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            if start is None or not is_plain(start):
                await send(message)
            else:
                plain.extend(message.get("body", b""))

        await self.app(scope, receive, intercept)
        ended = Refusal(503, "the replica ended before it had answered this request: ask again", code="replica_ended")
        if start is None:
            await ended.response()(scope, receive, send)
        elif is_plain(start):
            retry_after = header(start, b"retry-after")
            headers = {"Retry-After": retry_after.decode()} if retry_after else None
            refusal = Refusal(start["status"], plain.decode(errors="replace"), headers=headers)
            await refusal.response()(scope, receive, send)
        elif not complete and header(start, b"content-type").startswith(b"text/event-stream"):
            await send({"type": "http.response.body", "body": f"data: {ended.as_json()}\n\n".encode()})


def header(start: Message, name: bytes) -> bytes:
    """Return the value of a response's header, or b"" if the header is absent. name: header name in lower case."""
    headers: dict[bytes, bytes] = dict(start["headers"])
    return headers.get(name, b"")


def is_plain(start: Message) -> bool:
    """Return whether a response is an error of the proxy itself, rather than the application's: its errors are JSON."""
    return start["status"] >= 400 and not header(start, b"content-type").startswith(b"application/json")

"""Names that a server answers for, and web pages that may use it.

A page can point its own name at this machine. Its requests then count as its own site's to the browser, and carry that
name as their Host."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.common.errors import quoted
from jaxspec.server.refusal import Refusal
from jaxspec.server.settings import ANY, ServerConfig, is_loopback

HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]/@]+?)\.?)(?::\d*)?", re.IGNORECASE)  # an address or a name, a port
READING = ("GET", "HEAD")  # change nothing: a browser shows no other site's page what they return


class Guard:
    """Middleware that refuses requests for names that are not the server's, and of pages that may not use it."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.origins = app, config.allowed_origins
        self.any_host = ANY in config.allowed_hosts or not (config.allowed_hosts or is_loopback(config.host))
        self.hosts = {config.host.lower(), *config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is not None:
            scope.setdefault("state", {})["refusal"] = refusal  # for the request log
        await (self.app if refusal is None else refusal.response())(scope, receive, send)

    def refusal(self, method: str, headers: Headers) -> Refusal | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self.answers_for(host):  # only programs leave it out, browsers do not
            said = f"host {quoted(host)} is not this server's: --allowed-host adds a name"
            return Refusal(403, said, code="host_not_allowed")
        if origin is not None and method not in READING and not self.may_use(origin, host):
            said = f"pages of {quoted(origin)} may not use this server: --allowed-origin adds one"
            return Refusal(403, said, code="origin_not_allowed")
        return None

    def answers_for(self, host: str) -> bool:
        if self.any_host:
            return True
        found = HOST.fullmatch(host)
        name = (found[1] or found[2]).lower() if found else ""
        return name in self.hosts or is_loopback(name)

    def may_use(self, origin: str, host: str | None) -> bool:
        """Return whether a page's requests are served. Its own server's are, where that server's names are known."""
        own = not self.any_host and origin.partition("://")[2] == host
        return own or ANY in self.origins or origin in self.origins

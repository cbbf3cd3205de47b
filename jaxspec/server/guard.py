"""Checks of a request's headers Host and Origin, which keep unauthorised web pages from using the server.

A page can make its own domain name resolve to this machine (DNS rebinding). The browser then takes the server for the
page's own site, and sends that domain name as the Host.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.common.errors import quoted
from jaxspec.server.refusal import Refusal
from jaxspec.server.settings import ANY, ServerConfig, is_loopback

# Pattern of the header Host: an IPv6 address in brackets, or a name or IPv4 address; then an optional port.
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]/@]+?)\.?)(?::\d*)?", re.IGNORECASE)
SAFE_METHODS = ("GET", "HEAD")  # methods that change nothing; browsers hide the response from pages of other sites


class Guard:
    """ASGI middleware that refuses requests with a foreign Host, and requests of web pages that are not allowed."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.origins = app, config.allowed_origins
        self.any_host = ANY in config.allowed_hosts or not (config.allowed_hosts or is_loopback(config.host))
        self.hosts = {config.host.lower(), *config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering: ASGIApp = self.app
        refusal = self.refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is not None:
            scope.setdefault("state", {})["refusal"] = refusal  # read by the request log
            answering = refusal.response()
        await answering(scope, receive, send)

    def refusal(self, method: str, headers: Headers) -> Refusal | None:
        """Return the error with which a request of this method is refused, or None if the request is allowed."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self.answers_for(host):  # no browser sends a request without a Host
            message = f"host {quoted(host)} is not this server's: --allowed-host adds a name"
            return Refusal(403, message, code="host_not_allowed")
        if origin is not None and method not in SAFE_METHODS and not self.may_use(origin, host):
            message = f"pages of {quoted(origin)} may not use this server: --allowed-origin adds one"
            return Refusal(403, message, code="origin_not_allowed")
        return None

    def answers_for(self, host: str) -> bool:
        """Return whether the server accepts the value of a Host header.

        It accepts its own names and those of the loopback interface, or any value if it is configured so.
        """
        if self.any_host:
            return True
        found = HOST.fullmatch(host)
        name = (found[1] or found[2]).lower() if found else ""
        return name in self.hosts or is_loopback(name)

    def may_use(self, origin: str, host: str | None) -> bool:
        """Return whether web pages of an origin may use the server.

        Pages whose origin is the request's own Host may, unless the server accepts any Host.
        """
        own = not self.any_host and origin.partition("://")[2] == host
        return own or ANY in self.origins or origin in self.origins

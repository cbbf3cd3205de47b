"""Settings of the HTTP server: ServerConfig."""

from __future__ import annotations

import ipaddress
import re

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag, number, option, options, strings, whole

ANY = "*"  # value of allowed_hosts or allowed_origins that allows any host or origin
LARGEST_PORT = 65_535
# Field of ServerConfig that is a whole number -> its least value and, if there is one, its greatest.
COUNTS = {
    "port": (0, LARGEST_PORT),
    "max_queue": (0,),
    "max_connections": (1,),
    "max_body_bytes": (1,),
    "max_answer_logprobs": (0,),
}
# Field of ServerConfig that is a list of names -> the pattern of a valid name, and its description for messages.
NAMES = {
    "allowed_hosts": (
        re.compile(r"[\w.-]+|([0-9a-f]*:){2,}[0-9a-f.]*"),
        "a name or an address without scheme and port, or '*'",
    ),
    "allowed_origins": (
        re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s]+"),
        "a scheme and a host, such as 'https://example.com', 'null' or '*'",
    ),
}
SECONDS = ("request_timeout", "drain_timeout")
LONGEST = 1e6  # upper limit of each timeout, in seconds


@options
class ServerConfig:
    """The address of a server and the limits of its requests.

    Raises: UserError for a value out of its range.
    """

    host: str = option("Address to listen on. The default cannot be reached from other machines.", default="127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", default=8000)
    api_key: str | None = option('Key that clients have to send as "Authorization: Bearer ...".', default=None)
    allowed_hosts: str | tuple[str, ...] | list[str] = option(
        'Names that requests may have as their Host; "*" allows any. Loopback names and `host` are allowed, '
        "too. If no names are given, a server on any but a loopback address allows any.",
        default=(),
    )
    allowed_origins: str | tuple[str, ...] | list[str] = option(
        'Origins of web pages that may use the server, such as "https://example.com"; "*" allows any.',
        default=(),
    )
    served_model_name: str | None = option(
        "Name that requests use for the model. Default: the name with which it is loaded.",
        default=None,
    )
    max_queue: int = option("Samples that may wait for a row; requests for more are answered 429.", default=256)
    max_connections: int | None = option(
        "Connections at a time; by default 2,048, or fewer if the process may not open as many files. A new "
        "connection takes the place of the one that has kept the server waiting the longest.",
        default=None,
    )
    max_body_bytes: int = option("Largest body of a request, in bytes.", default=1 << 20)
    refuse_control_tokens: bool = option(
        "Refuse texts that hold a control token of the model, such as <|im_end|>.",
        default=False,
    )
    separate_reasoning: bool = option(
        "Part the reasoning of chats, such as <think>...</think>, from their content.",
        default=True,
    )
    page: bool = option("Show at / a page on which people can try the model and see its drafts.", default=True)
    enable_log_requests: bool = option(
        "Write a line for each request on standard error, without its texts.",
        default=False,
    )
    max_answer_logprobs: int = option(
        "Largest number of log-probabilities in an answer: samples x tokens x entries of a token.",
        default=500_000,
    )
    request_timeout: float = option("Seconds that a request may take, including its wait in the queue.", default=600.0)
    drain_timeout: float = option("Seconds that running requests have to end after SIGTERM or SIGINT.", default=30.0)

    def __post_init__(self) -> None:
        for name, limits in COUNTS.items():
            value = getattr(self, name)
            if value is not None or name != "max_connections":
                object.__setattr__(self, name, whole(name, value, *limits))
        for name, (form, words) in NAMES.items():
            values = tuple(value.lower() for value in strings(name, getattr(self, name)))
            object.__setattr__(self, name, values)
            for value in values:
                if value != ANY and not form.fullmatch(value):
                    raise UserError(f"{name}={quoted(value)} must be {words}")
        for name in SECONDS:
            seconds = number(name, getattr(self, name))
            object.__setattr__(self, name, seconds)
            if not 0.0 < seconds <= LONGEST:
                raise UserError(f"{name}={seconds} must be more than 0 seconds and at most {LONGEST:g}")
        for name in ("refuse_control_tokens", "separate_reasoning", "page", "enable_log_requests"):
            flag(name, getattr(self, name))
        for name in ("api_key", "served_model_name"):
            if getattr(self, name) == "":
                raise UserError(f"{name} is empty: leave it out, or give one")
        key, served = self.api_key, self.served_model_name
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise UserError("api_key must be of printable ASCII characters, no space at an end: HTTP carries no others")
        if served is not None and not served.isprintable():
            raise UserError(f"served_model_name={quoted(served)} must be of printable characters: answers hold it")


def is_loopback(host: str) -> bool:
    """Return whether a host name or an IP address belongs to the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

"""Hosts and origins: what a web page can make a browser send to a server that it cannot name."""

from __future__ import annotations

import json

import pytest

from jaxspec.common.errors import UserError
from jaxspec.server.guard import Guard
from jaxspec.server.settings import ServerConfig
from tests.server.running import MODEL, posted
from tests.server.test_bodies import answered

ASKED = {"model": MODEL, "prompt": "x", "max_tokens": 2}
PAGE, OTHER = "https://chat.example", "https://evil.example"


def asked(server, method: str = "GET", path: str = "/v1/models", **headers: str) -> tuple[int, dict[str, str]]:
    """(status, headers) of a request without a body."""
    given = {"Host": "localhost", "Connection": "close"} | {n.replace("_", "-"): v for n, v in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    head, _, _ = server.raw("\r\n".join([*lines, "", ""]).encode()).decode().partition("\r\n\r\n")
    status, *fields = head.split("\r\n")
    return int(status.split()[1]), dict(field.lower().split(": ", 1) for field in fields)


LOOPBACK = [
    "localhost",
    "LocalHost:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.1.2.3",
    "[::1]",
    "[::1]:8000",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil-localhost",
    "10.0.0.1",
    "[::2]",
    "0.0.0.0",
]
BROKEN = ["", ":8000", "[::1", "::1", "localhost:80:80", "evil.example@localhost", "localhost/evil", "localhost:http"]


def test_a_loopback_server_answers_for_loopback_names(server):
    for host in LOOPBACK:
        assert asked(server, Host=host)[0] == 200, host
    for host in [*FOREIGN, *BROKEN]:
        for path in ("/v1/models", "/health", "/metrics"):
            assert asked(server, Host=host, path=path)[0] == 403, host
    status, error = answered(server, posted(ASKED, Host="evil.example:8000"))
    assert (status, error["code"]) == (403, "host_not_allowed")
    assert error["message"] == "host 'evil.example:8000' is not this server's: --allowed-host adds a name"
    assert server.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200"), "browsers send their host"


@pytest.mark.parametrize(
    ("options", "served", "refused"),
    [
        ({}, LOOPBACK, FOREIGN),
        ({"host": "127.0.0.2"}, LOOPBACK, FOREIGN),
        ({"host": "::1"}, LOOPBACK, FOREIGN),
        ({"allowed_hosts": "API.example"}, [*LOOPBACK, "api.example:8000", "Api.Example"], FOREIGN),
        ({"allowed_hosts": ["10.0.0.1", "::2"]}, ["10.0.0.1:8000", "[::2]", "localhost"], ["10.0.0.2", "evil.example"]),
        ({"allowed_hosts": "*"}, [*LOOPBACK, *FOREIGN, *BROKEN], []),
        ({"host": "0.0.0.0"}, [*LOOPBACK, *FOREIGN, *BROKEN], []),
        ({"host": "10.0.0.1", "allowed_hosts": ["api.example"]}, [*LOOPBACK, "api.example", "10.0.0.1"], ["[::2]"]),
    ],
)
def test_which_names_a_server_answers_for(options, served, refused):
    guard = Guard(None, ServerConfig(**options))
    assert [host for host in [*served, *refused] if guard.answers_for(host)] == served


@pytest.mark.parametrize("origin", [OTHER, "null", "http://localhost:3000", "http://evil.example:8000"])
def test_pages_of_others_may_not_use_a_server(another, origin):
    """Though it answers for any name; what they may read without asking, their browser does not show them."""
    rebound = origin.partition("://")[2] if "evil" in origin else "localhost"  # as the page calls the server
    for server in (another(), another(allowed_hosts="*")):
        status, error = answered(server, posted(ASKED, Host=rebound, Origin=origin))
        assert (status, error["type"]) == (403, "invalid_request_error")
        status, error = answered(server, posted(ASKED, Origin=origin))
        assert (status, error["code"]) == (403, "origin_not_allowed")
        assert error["message"] == f"pages of {origin!r} may not use this server: --allowed-origin adds one"
        asking = {"Origin": origin, "Access_Control_Request_Method": "POST"}
        assert asked(server, "OPTIONS", "/v1/completions", **asking)[0] == 403
        status, headers = asked(server, Origin=origin)
        assert (status, "access-control-allow-origin" in headers) == (200, False)


def test_a_servers_own_pages_may_use_it(another):
    """Such as those of a proxy that serves pages and this server under one name."""
    server = another(allowed_hosts="chat.example")
    assert b"200 OK" in server.raw(posted(ASKED, Host="chat.example", Origin=PAGE))
    assert b"200 OK" in server.raw(posted(ASKED, Host="localhost:8000", Origin="http://localhost:8000"))
    assert answered(server, posted(ASKED, Host="localhost", Origin=PAGE))[0] == 403


@pytest.mark.parametrize(("origins", "others"), [([PAGE, "null"], 403), ("*", 200)])
def test_pages_that_may_use_a_server(another, origins, others):
    server = another(allowed_origins=origins)
    asking = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
    for origin, expected in ((PAGE, 200), ("null", 200), (OTHER, others)):
        assert int(server.raw(posted(ASKED, Origin=origin)).split()[1]) == expected
        status, headers = asked(server, "OPTIONS", "/v1/chat/completions", Origin=origin, **asking)
        assert status == expected
        allowed = {origin, "*"} if expected == 200 else {None}
        assert headers.get("access-control-allow-origin") in allowed
        if expected == 200:
            assert "POST" in headers["access-control-allow-methods"].upper()
            assert "authorization" in headers["access-control-allow-headers"]
        assert asked(server, Origin=origin)[1].get("access-control-allow-origin") in allowed
    head, _, body = server.raw(posted(b"{", Origin=PAGE)).decode().partition("\r\n\r\n")
    assert "access-control-allow-origin" in head.lower(), "a page reads why it was refused"
    assert json.loads(body)["error"]["message"].startswith("the body is not JSON")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("allowed_hosts", "http://x", "allowed_hosts='http://x' must be a name or an address without scheme and port"),
        ("allowed_hosts", "x:80", "allowed_hosts='x:80' must be"),
        ("allowed_hosts", "*.example", r"allowed_hosts='\*.example' must be"),
        ("allowed_hosts", "", "allowed_hosts='' must hold non-empty strings"),
        ("allowed_hosts", 5, "allowed_hosts=5 must hold non-empty strings"),
        ("allowed_origins", "chat.example", "allowed_origins='chat.example' must be a scheme and a host"),
        (
            "allowed_origins",
            ["https://a.example", "https://a.example/"],
            "allowed_origins='https://a.example/' must be",
        ),
    ],
)
def test_names_that_are_none(name, value, message):
    with pytest.raises(UserError, match=message):
        ServerConfig(**{name: value})

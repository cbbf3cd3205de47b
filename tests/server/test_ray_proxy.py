"""What Ray Serve's proxy says, or does not say, in OpenAI's form; replicas that die are in test_replicas.py."""

from __future__ import annotations

import asyncio
import json

import pytest

from jaxspec.server import ray_proxy


def start(status: int, kind: str, *more: list[bytes]) -> dict:
    return {"type": "http.response.start", "status": status, "headers": [[b"content-type", kind.encode()], *more]}


def body(text: str, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def answered(messages: list[dict], path: str = "/v1/completions") -> tuple[int, dict[str, str], str]:
    """(status, headers, body) of what a client gets where the proxy sends these messages."""
    found: list[dict] = []

    async def proxy(scope, receive, send):
        for message in messages:
            await send(message)

    async def send(message):
        found.append(message)

    (middleware,) = ray_proxy.middlewares()
    asyncio.run(middleware.cls(proxy)({"type": "http", "method": "POST", "path": path}, None, send))
    head, *pieces = found
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    headers = {name.decode(): value.decode() for name, value in head["headers"]}
    return head["status"], headers, b"".join(piece["body"] for piece in pieces).decode()


def test_no_answer_is_an_error():
    status, _, text = answered([])
    assert (status, json.loads(text)["error"]["code"]) == (503, "replica_ended")


def test_a_stream_that_breaks_off_ends_with_an_error_event():
    _, _, text = answered([start(200, "text/event-stream; charset=utf-8"), body("data: {}\n\n", more=True)])
    first, last, end = text.split("\n\n")
    assert (first, end) == ("data: {}", "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_ended"


@pytest.mark.parametrize("status", [404, 408, 429, 503])
def test_plain_text_becomes_an_error_object(status):
    plain = start(status, "text/plain; charset=utf-8", [b"retry-after", b"3"])
    found, headers, text = answered([plain, body("Too much.")])
    assert (found, headers["retry-after"], headers["content-type"]) == (status, "3", "application/json")
    assert json.loads(text)["error"]["message"] == "Too much."


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ([start(400, "application/json"), body("{}")], "/v1/completions"),
        ([start(200, "text/event-stream"), body("data: {}\n\n", more=True), body("")], "/v1/completions"),
        ([start(200, "text/plain"), body("a", more=True), body("b")], "/metrics"),
        ([start(503, "text/plain"), body("draining")], "/-/healthz"),
    ],
)
def test_what_is_whole_goes_through_as_it_is(messages, path):
    status, headers, text = answered(messages, path)
    assert (status, headers["content-type"]) == (messages[0]["status"], messages[0]["headers"][0][1].decode())
    assert text == "".join(message["body"].decode() for message in messages[1:])

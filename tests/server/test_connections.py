"""Connections that send or read slowly, or nothing at all: each costs only its own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from jaxspec.common.errors import UserError
from jaxspec.server import connections
from tests.api.async_llm.calls import SOON
from tests.server.running import GREEDY, connected, posted, until_closed, wait
from tests.server.test_ends import ROOT, SMALL
from tests.server.test_load import SLOW, narrow

MOST = 8
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
METRICS = HEALTH.replace(b"health", b"metrics")
# What a client sends before it goes silent, in each phase of a connection.
SILENT = {
    "nothing": b"",
    "half a header": HEALTH[:30],
    "half a body": posted({"prompt": "x"})[:-3],
    "a body that nobody reads": posted({}, "/v1/embeddings")[:-1] + b" " * 100,
    "idle": HEALTH,
    "half a header after a request": HEALTH + HEALTH[:30],
    "many requests, and reads nothing": METRICS * 200,
    "no HTTP, and reads nothing": b"\x16\x03\x01\r\n\r\n",
}


def is_healthy(server) -> bool:
    with urllib.request.urlopen(server.url + "/health", timeout=SOON) as answer:
        return json.loads(answer.read()) == {"status": "ok"}


def open_connections(server) -> set[connections.Connection]:
    return server.server.connections


def trickle(connection: socket.socket, byte: bytes) -> None:
    """Send a byte after the other until the server ends the connection."""
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(byte)
            time.sleep(0.05)


@pytest.mark.parametrize("sent", SILENT.values(), ids=SILENT)
def test_silent_clients_keep_nobody_out(another, monkeypatch, sent):
    """Three times as many as there may be connections: whoever comes takes the place of one of them."""
    monkeypatch.setattr(connections, "PAUSE", 0.05)
    server = narrow(another(max_connections=MOST))
    with contextlib.ExitStack() as stack:
        for _ in range(3 * MOST):
            stack.enter_context(connected(server.port, **SLOW)).sendall(sent)
        for _ in range(3):
            assert is_healthy(server)
        assert len(open_connections(server)) <= MOST
        assert server.client().completions.create(prompt="x", **GREEDY).usage.completion_tokens == 24


def test_who_is_served_is_not_put_out(another, monkeypatch):
    """Where every connection is at work a newcomer waits for one to end."""
    server = another(max_connections=2)
    engine = server.llm.llm.engine
    step, slow = engine.step, [True]
    monkeypatch.setattr(engine, "step", lambda **more: (slow and time.sleep(0.05)) or step(**more))
    with connected(server.port) as one, connected(server.port) as two:
        for connection in (one, two):
            connection.sendall(posted({"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True}))
        wait(lambda: server.gate.inside == 2)
        with connected(server.port) as three:
            three.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            three.settimeout(0.2)
            with pytest.raises(TimeoutError):
                three.recv(1)
            three.settimeout(SOON)
            slow.clear()
            assert all(b"200 OK" in until_closed(connection) for connection in (one, two, three))


def test_more_clients_than_connections_lose_nothing(another, monkeypatch):
    """Each asks again as soon as it has its answer, which says that its connection ends."""
    monkeypatch.setattr(connections, "PAUSE", SOON)
    server = another(max_connections=MOST)
    asked = GREEDY | {"max_tokens": 2}

    async def main():
        async with server.async_client() as client:

            async def ask():
                for _ in range(4):
                    await client.completions.create(prompt="x", **asked)

            await asyncio.gather(*(ask() for _ in range(4 * MOST)))

    asyncio.run(asyncio.wait_for(main(), SOON))


def test_who_reads_slowly_is_not_put_out_at_once(another, monkeypatch):
    monkeypatch.setattr(connections, "PAUSE", SOON)
    server = narrow(another(max_connections=1))
    asked = {"model": "tiny", "prompt": ["x"] * 8, "max_tokens": 24, "logprobs": 20, "ignore_eos": True}
    with connected(server.port, **SLOW) as slow:
        slow.sendall(posted(asked))
        wait(lambda: [connection.awaited for connection in open_connections(server)] == ["reading"])
        with connected(server.port) as newcomer:
            newcomer.sendall(HEALTH)
            newcomer.settimeout(0.2)
            with pytest.raises(TimeoutError):
                newcomer.recv(1)
            newcomer.settimeout(SOON)
            _, _, body = until_closed(slow).partition(b"\r\n\r\n")
            assert len(json.loads(body)["choices"]) == 8
            assert b"200 OK" in newcomer.recv(1 << 16)


@pytest.mark.parametrize("half", [b"", HEALTH[:30]])
@pytest.mark.parametrize("before", [b"", HEALTH])
def test_headers_have_a_time_limit(another, monkeypatch, before, half):
    monkeypatch.setitem(connections.LIMITS, "headers", 0.3)
    found = another().raw(before + half)
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200"] * bool(before) + [b"408"] * bool(half)
    assert (b'"message":"the headers did not arrive within 0.3 seconds"' in found) == bool(half)


@pytest.mark.parametrize("sent", [HEALTH[:30], HEALTH + b"\r\n"])
def test_bytes_that_come_one_by_one_do_not_extend_it(another, monkeypatch, sent):
    monkeypatch.setitem(connections.LIMITS, "headers", 0.3)
    server = another()
    with connected(server.port) as connection:
        connection.sendall(sent)
        trickle(connection, sent[-1:])
    wait(lambda: not open_connections(server))


def test_a_rest_of_a_body_has_a_time_limit(another, monkeypatch):
    """A body that is not read, since its request was refused before."""
    monkeypatch.setitem(connections.LIMITS, "headers", 0.3)
    server = another()
    with connected(server.port) as connection:
        connection.sendall(posted(b"{", "/v1/embeddings", Content_Length="1000", Connection="keep-alive"))
        trickle(connection, b" ")
    wait(lambda: not open_connections(server))


@pytest.mark.parametrize("close", [False, True])
def test_reading_has_a_time_limit(another, monkeypatch, close):
    """Though the request is over, and the connection is to be closed."""
    monkeypatch.setitem(connections.LIMITS, "reading", 0.3)
    server = narrow(another())
    asked = {"model": "tiny", "prompt": ["x"] * 8, "max_tokens": 24, "logprobs": 20, "ignore_eos": True}
    with connected(server.port, **SLOW) as connection:
        connection.sendall(posted(asked, Connection="close" if close else "keep-alive"))
        wait(lambda: server.gate.inside)
        wait(lambda: not server.gate.inside)
        wait(lambda: not open_connections(server))
    assert is_healthy(server)


def test_no_file_descriptor_left(another, caplog):
    """One line in the log; and a client that kept the server waiting makes room."""
    server = another()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(server.port) as silent, socket.socket() as late:
        wait(lambda: open_connections(server))
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            late.connect(("127.0.0.1", server.port))
            late.settimeout(SOON)
            late.sendall(HEALTH)
            assert b"200 OK" in late.recv(1 << 16)
            assert silent.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (line,) = caplog.messages
    assert "cannot accept a connection: [Errno 24] Too many open files" in line


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (256, 256, 128, None),
        (512, 600, 344, 600),
        (1024, 1024, 768, None),
        (1024, 1 << 20, 2048, 2304),
        (1 << 20, 1 << 20, 2048, None),
        (1024, resource.RLIM_INFINITY, 2048, 2304),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048, None),
    ],
)
def test_as_many_connections_as_files_allow(monkeypatch, soft, hard, most, raised):
    """The process raises its own limit, as far as it may."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: limits.append(found))
    assert connections.max_connections(None) == most
    assert limits[1:] == ([(raised, hard)] if raised else [])
    assert connections.max_connections(most) == most
    if hard in (256, 600, 1024):
        message = f"max_connections={most + 1} is above {most}: this process may open {hard} files"
        with pytest.raises(UserError, match=message):
            connections.max_connections(most + 1)
    else:
        assert connections.max_connections(most + 1) == most + 1


@pytest.mark.thorough
def test_more_half_sent_headers_than_file_descriptors(folder, tmp_path):
    """A process that may open 256 files: it answers, and its log stays small."""
    words, log = ["serve", folder, "--port", "0", *SMALL], tmp_path / "log"
    few = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    with log.open("w") as stderr:
        process = subprocess.Popen([*few, sys.executable, "-m", "jaxspec.cli", *words], cwd=ROOT, stderr=stderr)
    try:
        wait(lambda: " at http" in log.read_text())
        port = int(re.search(r"at http://127.0.0.1:(\d+)", log.read_text())[1])
        with contextlib.ExitStack() as stack:
            for _ in range(306):
                stack.enter_context(connected(port)).sendall(HEALTH[:30])
            for _ in range(5):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SOON) as answer:
                    assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
        assert "128 connections are fewer than the 260 samples" in log.read_text()
        assert len(log.read_text()) < 1000
    finally:
        process.kill()
        process.wait()

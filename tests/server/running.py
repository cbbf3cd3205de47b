"""Servers on real sockets, in a thread of this process, and what a test asks of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import openai

from jaxspec import AsyncLLM
from jaxspec.server import run
from jaxspec.server.app import make_app
from jaxspec.server.settings import ServerConfig
from tests.api.async_llm.calls import SOON, assert_idle

MODEL = "tiny"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
LONG = GREEDY | {"max_tokens": 400}


class Running:
    """A server of an AsyncLLM that others may serve too."""

    def __init__(self, llm: AsyncLLM, **options) -> None:
        self.llm, self.config = llm, ServerConfig(port=0, **options)
        self.gate = run.gate_of(llm, self.config)
        self.listening = run.bound(self.config)
        self.port = self.listening.getsockname()[1]
        app = make_app(llm, self.config, self.config.served_model_name or MODEL, self.gate)
        self.server = run.server_of(app, self.config)
        self.clients: list[openai.OpenAI] = []  # left to the garbage collector, their sockets would be found open
        self.thread = threading.Thread(target=self.main, daemon=True)
        self.thread.start()
        wait(lambda: self.server.started)

    def main(self) -> None:
        async def serving():
            self.loop = asyncio.get_running_loop()
            await self.server.serve([self.listening])

        asyncio.run(serving())

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.server.should_exit = True
        self.thread.join(SOON)
        assert not self.thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options) -> openai.OpenAI:
        made = openai.OpenAI(base_url=self.url + "/v1", **{"api_key": "any", "max_retries": 0} | options)
        self.clients.append(made)
        return made

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", **{"api_key": "any", "max_retries": 0} | options)

    def assert_idle(self) -> None:
        """Nobody is inside, nothing runs, and all pages are free."""
        wait(lambda: not self.gate.inside)
        assert not self.gate.limits
        assert_idle(self.llm)

    def raw(self, sent: bytes, *, half: bool = False, seconds: float = SOON) -> bytes:
        """What the server answers to these bytes, until it closes or has said all. half: nothing more is sent."""
        with connected(self.port) as connection:
            connection.settimeout(seconds)
            connection.sendall(sent)
            if half:
                connection.shutdown(socket.SHUT_WR)
            return until_closed(connection)


@contextlib.contextmanager
def connected(port: int, **options: int) -> Iterator[socket.socket]:
    """options: as of setsockopt, set before it connects."""
    with socket.socket() as connection:
        for name, value in options.items():
            connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        connection.connect(("127.0.0.1", port))
        connection.settimeout(SOON)
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def posted(body: bytes | dict, path: str = "/v1/completions", **headers: str) -> bytes:
    """A request as it is sent; the connection closes after it."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    named = [f"{name}: {value}" for name, value in given.items() if value]
    lines = [f"POST {path} HTTP/1.1", *([] if "Host" in given else ["Host: localhost"]), *named]
    return "\r\n".join([*lines, "", ""]).encode() + body


def wait(condition) -> None:
    until = time.monotonic() + SOON
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()

"""A server from its socket to its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from jaxspec.async_llm import AsyncLLM
from jaxspec.errors import UserError
from jaxspec.server.app import make_app
from jaxspec.server.gate import Gate
from jaxspec.server.settings import ServerConfig

CONNECTIONS_END = 3  # seconds in which connections have to close when everything is said
ENDINGS = (signal.SIGTERM, signal.SIGINT)


def bound(config: ServerConfig) -> socket.socket:
    """The server's socket, before the model is loaded: it takes no connection yet. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        said = f"cannot listen on {config.host} port {config.port}: {error.strerror or error}"
        raise UserError(f"{said}; --host and --port choose another") from None
    return found


def gate_of(llm: AsyncLLM, config: ServerConfig) -> Gate:
    return Gate(llm.llm.config.max_num_seqs, config.max_queue)


def serve(llm: AsyncLLM, config: ServerConfig, model: str, listening: socket.socket, ready: Callable[[], None]) -> Gate:
    """Serves until SIGTERM or SIGINT, and returns when all that ran has ended or was cut off. model: its name."""
    gate = gate_of(llm, config)
    asyncio.run(
        until_told(make_app(llm, config, config.served_model_name or model, gate), gate, config, listening, ready)
    )
    return gate


async def until_told(
    app: ASGIApp, gate: Gate, config: ServerConfig, listening: socket.socket, ready: Callable[[], None]
) -> None:
    told = asyncio.Event()
    with signals(told):
        server = server_of(app)
        serving = asyncio.ensure_future(server.serve([listening]))
        waiting = asyncio.ensure_future(told.wait())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await gate.drain(config.drain_timeout)  # new connections are answered meanwhile: 503
        server.should_exit = True
        await serving


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are this module's."""
        yield


def server_of(app: ASGIApp) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=CONNECTIONS_END,
        )
    )


@contextlib.contextmanager
def signals(told: asyncio.Event) -> Iterator[None]:
    """The first sets the event. A second ends the process at once."""
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in ENDINGS}

    def first() -> None:
        told.set()
        for number in ENDINGS:
            loop.remove_signal_handler(number)

    for number in ENDINGS:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

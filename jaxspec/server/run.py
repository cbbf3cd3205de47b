"""A server from its socket to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.common.errors import UserError
from jaxspec.server.app import make_app
from jaxspec.server.connections import IDLE, Connection, Listener, max_connections
from jaxspec.server.gate import Gate
from jaxspec.server.settings import ServerConfig

logger = logging.getLogger(__name__)

CONNECTIONS_END = 3  # seconds in which connections have to close when everything is said
ENDINGS = (signal.SIGTERM, signal.SIGINT)


def bound(config: ServerConfig) -> socket.socket:
    """The server's socket, before the model is loaded: it takes no connection yet. Raises UserError."""
    max_connections(config.max_connections)
    with contextlib.ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            found = opened.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except (OSError, UnicodeError) as error:  # the latter of a name that no host has
            said = f"cannot listen on {config.host} port {config.port}: {getattr(error, 'strerror', None) or error}"
            raise UserError(f"{said}; --host and --port choose another") from None
        opened.pop_all()
        return found


def gate_of(llm: AsyncLLM, config: ServerConfig) -> Gate:
    return Gate(llm.llm.config.max_num_seqs, config.max_queue)


def serve(
    llm: AsyncLLM, config: ServerConfig, model: str, listening: socket.socket, ready: Callable[[], None]
) -> tuple[int, int]:
    """Serves until SIGTERM or SIGINT, and returns when all that ran has ended or was cut off -> (the signal, how many
    were). model: its name."""
    gate = gate_of(llm, config)
    if (most := max_connections(config.max_connections)) < gate.most:
        fewer = "%d connections are fewer than the %d samples that may run and wait"
        logger.warning(f"{fewer}: raise `ulimit -n` or --max-connections", most, gate.most)
    app = make_app(llm, config, config.served_model_name or model, gate)
    gc.freeze()  # a search for garbage through model and libraries would stop the event loop for tenths of a second
    try:
        return asyncio.run(until_told(app, gate, config, listening, ready)), gate.num_cut
    finally:
        gc.unfreeze()


async def until_told(
    app: ASGIApp, gate: Gate, config: ServerConfig, listening: socket.socket, ready: Callable[[], None]
) -> int:
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with signals(told):
        server = server_of(app, config)
        serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        either: list[asyncio.Future[Any]] = [serving, told]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await gate.drain(config.drain_timeout)  # new connections are answered meanwhile: 503
        server.should_exit = True
        await serving
        return told.result()


class Server(Listener):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are this module's."""
        yield


def server_of(app: ASGIApp, config: ServerConfig) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="warning",
            log_config=None,  # its own would close the handlers that there are
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=CONNECTIONS_END,
        ),
        max_connections(config.max_connections),
    )


@contextlib.contextmanager
def signals(told: asyncio.Future[int]) -> Iterator[None]:
    """The first is the future's result. A second ends the process at once."""
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in ENDINGS}

    def first(number: int) -> None:
        told.set_result(number)
        for other in ENDINGS:
            loop.remove_signal_handler(other)
            signal.signal(other, signal.SIG_DFL)  # Python's own would raise within whatever runs

    for number in ENDINGS:
        loop.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Running of the HTTP server: its socket, its event loop, its signals and its shutdown."""

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

CLOSE_TIMEOUT = 3  # largest number of seconds that connections may take to close at the end of a shutdown
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bound(config: ServerConfig) -> socket.socket:
    """Return the server's socket, bound but not listening yet. A port in use is thus detected before the model loads.

    Raises: UserError if the socket cannot be bound or max_connections is too large.
    """
    max_connections(config.max_connections)
    with contextlib.ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            found = opened.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except (OSError, UnicodeError) as error:  # UnicodeError means that no host can have that name
            message = f"cannot listen on {config.host} port {config.port}: {getattr(error, 'strerror', None) or error}"
            raise UserError(f"{message}; --host and --port choose another") from None
        opened.pop_all()
        return found


def gate_of(llm: AsyncLLM, config: ServerConfig) -> Gate:
    """Return the Gate that limits the samples to the rows of the LLM's batch plus the server's queue."""
    return Gate(llm.llm.config.max_num_seqs, config.max_queue)


def serve(
    llm: AsyncLLM, config: ServerConfig, model: str, listening: socket.socket, ready: Callable[[], None]
) -> tuple[int, int]:
    """Serve until SIGTERM or SIGINT, then wait until all requests have ended or are cut off.

    model: name of the model for clients, unless config.served_model_name is given.
    listening: the socket that `bound` returned.
    ready: function that is called once the server accepts connections.

    Returns: the number of the signal, and the number of requests that were cut off.
    """
    gate = gate_of(llm, config)
    most = max_connections(config.max_connections)
    if most < gate.most:
        fewer = "%d connections are fewer than the %d samples that may run and wait"
        logger.warning(f"{fewer}: raise `ulimit -n` or --max-connections", most, gate.most)
    app = make_app(llm, config, config.served_model_name or model, gate)
    # Exclude model and libraries from garbage collection, which would stop the event loop for tenths of a second.
    gc.freeze()
    try:
        number = asyncio.run(until_signal(app, gate, config, listening, ready))
        return number, gate.num_cut
    finally:
        gc.unfreeze()


async def until_signal(
    app: ASGIApp, gate: Gate, config: ServerConfig, listening: socket.socket, ready: Callable[[], None]
) -> int:
    """Serve until a signal comes, wait for the admitted requests to end, and return the signal's number."""
    signalled: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with signals(signalled):
        server = server_of(app, config)
        serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        either: list[asyncio.Future[Any]] = [serving, signalled]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await gate.drain(config.drain_timeout)  # new requests are answered 503 meanwhile
        server.should_exit = True
        await serving
        return signalled.result()


class Server(Listener):
    """The HTTP server without uvicorn's signal handlers, which `signals` replaces."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing. uvicorn's own method would install signal handlers."""
        yield


def server_of(app: ASGIApp, config: ServerConfig) -> Server:
    """Return a server for an application. It is not started yet."""
    return Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="warning",
            log_config=None,  # uvicorn's own configuration would close the log handlers of the process
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
        ),
        max_connections(config.max_connections),
    )


@contextlib.contextmanager
def signals(signalled: asyncio.Future[int]) -> Iterator[None]:
    """Return a context that handles SIGTERM and SIGINT.

    The first of these signals sets the future's result to its number. A second one ends the process at once.
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def first(number: int) -> None:
        signalled.set_result(number)
        for other in STOP_SIGNALS:
            loop.remove_signal_handler(other)
            # The system's handler ends the process. Python's would raise KeyboardInterrupt in whatever code runs.
            signal.signal(other, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The server's connections: limits of their number, and of the time that a client may keep the server waiting."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import math
import resource
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.common.errors import UserError
from jaxspec.server.refusal import Refusal

logger = logging.getLogger(__name__)

DEFAULT_MAX_CONNECTIONS = 2048
SPARE_FILES = 256  # number of file descriptors for all but connections; at most half of the descriptors
BACKLOG = 2048  # largest number of connections that the kernel queues until the server accepts them
RETRY = 0.5  # seconds between a failure to accept a connection and the next attempt
POLL = 0.01  # seconds between checks for a free place while no open connection may be closed for a new one
REPORT = 60.0  # least seconds between two log lines about failures to accept a connection
# Event that the server waits for -> seconds that the client has for it. The limit for a request's body is in body.py.
LIMITS = {"headers": 30.0, "reading": 60.0}
PAUSE = 1.0  # seconds of waiting for a client after which its connection may be closed for a new one
IDLE = 5  # seconds after an answer until a connection without a further request is closed


def max_connections(asked: int | None) -> int:
    """Return the largest number of connections at a time: `asked`, or DEFAULT_MAX_CONNECTIONS if `asked` is None.

    The default is lowered if the process may not open that many files.

    Raises: UserError if `asked` is more than the process may open.
    """
    files = raised_file_limit((asked or DEFAULT_MAX_CONNECTIONS) + SPARE_FILES)
    room = max(files - SPARE_FILES, files // 2, 1)
    if asked is not None and asked > room:
        why = f"this process may open {files} files, and needs some itself; `ulimit -n` raises that"
        raise UserError(f"max_connections={asked} is above {room}: {why}")
    return asked or min(DEFAULT_MAX_CONNECTIONS, room)


def raised_file_limit(wanted: int) -> int:
    """Raise the process's limit of open files to `wanted`, or as far as the system allows, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if raised > soft:
        with contextlib.suppress(ValueError, OSError):  # raised if the system has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            return raised
    return soft


class Connection(H11Protocol):
    """A client's connection, which closes when the client keeps the server waiting for too long.

    awaited: what the server waits for: "headers" or "body" of a request, or "reading" (the client has not read all of
      the answer so far). None: the server does not wait.
    since: start of that wait, in seconds on the event loop's clock.
    last: whether the connection closes after the current answer, or after the next one if there is none.
    timer: scheduled call of `end` when the time limit of the wait is over.
    """

    awaited: str | None = None
    since = 0.0
    last = False
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # asyncio then calls pause_writing as soon as any output is left unsent
        self.update_awaited()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.wait_for(None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.update_awaited()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.update_awaited()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.update_awaited()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.update_awaited()

    def update_awaited(self) -> None:
        """Determine what the server waits for now, and start the time limit of that wait."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.last and self.cycle.keep_alive:
            self.cycle.keep_alive = False
            # With this header in the request, as if the client had sent it, uvicorn answers with "Connection: close".
            self.cycle.scope["headers"] = [*self.cycle.scope["headers"], CLOSE_HEADER]
        if self.flow.write_paused:
            self.wait_for("reading")
        elif not answering:
            self.wait_for("headers")
        else:
            self.wait_for("body" if self.cycle.more_body else None)

    def wait_for(self, awaited: str | None) -> None:
        """Record what the server waits for, and start its time limit. Do nothing if that has not changed."""
        if awaited == self.awaited:
            return
        if self.timer is not None:
            self.timer.cancel()
        seconds = LIMITS.get(awaited or "")
        self.timer = None if seconds is None else self.loop.call_later(seconds, self.end)
        self.awaited, self.since = awaited, self.loop.time()

    @property
    def evictable(self) -> bool:
        """Return whether this connection may be closed to make room for a new one."""
        return self.awaited is not None and self.loop.time() - self.since > PAUSE

    def close_after_answer(self) -> None:
        """Close the connection after the current answer, or after the next one if there is none.

        If the answer's headers are not sent yet, they announce the end of the connection.
        """
        self.last = True
        self.update_awaited()

    def end(self) -> None:
        """Close the connection because its time limit is over. Incomplete headers are answered with status 408."""
        if self.awaited == "headers" and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.refuse(Refusal(408, f"the headers did not arrive within {LIMITS['headers']:g} seconds"))
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that h11 cannot parse. uvicorn calls this method, whose original would answer in plain text."""
        self.refuse(Refusal(400, "the bytes sent are not an HTTP/1.1 request, or its headers are too long"))

    def refuse(self, refusal: Refusal) -> None:
        """Answer bytes that are not a complete request with an error, and close the connection."""
        # In other states an answer has begun or none can be sent, so the connection is closed without an error answer.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = refusal.response()
            reason = http.HTTPStatus(refusal.status).phrase
            head = h11.Response(
                status_code=refusal.status, headers=[*answer.raw_headers, CLOSE_HEADER], reason=reason.encode()
            )
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Listener(uvicorn.Server):
    """A uvicorn server that accepts its connections itself, so that at most `most` are open at a time.

    asyncio's own server would accept thousands of connections in one turn of the event loop, and log each failure.
    """

    def __init__(self, config: uvicorn.Config, most: int) -> None:
        super().__init__(config)
        self.most = most
        self.reported = -math.inf  # time of the last log line about a failure to accept a connection
        self.accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in sockets or ():
            listening.setblocking(False)
            listening.listen(BACKLOG)
            self.accepting.append(asyncio.create_task(self.accept(listening)))
        await super().startup([])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.accepting:
            task.cancel()
        await asyncio.gather(*self.accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections from this listening socket until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # raised for example if no file descriptor is left
                self.report(error)
                await asyncio.sleep(RETRY)
                self.evict()
            else:
                await self.take(accepted)

    async def take(self, accepted: socket.socket) -> None:
        """Open a Connection on an accepted socket as soon as fewer than `most` are open."""
        try:
            while len(self.connections) >= self.most:
                if not self.evict():
                    for connection in self.connections:
                        connection.close_after_answer()
                    await asyncio.sleep(POLL)
                await asyncio.sleep(0)
            await asyncio.get_running_loop().connect_accepted_socket(self.connection, accepted)
        except BaseException as error:
            accepted.close()
            if not isinstance(error, OSError):  # an OSError means that the client has disconnected
                raise

    @property
    def connections(self) -> set[Connection]:
        return self.server_state.connections  # type: ignore[return-value]

    def connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def evict(self) -> bool:
        """Close the connection that has kept the server waiting the longest. Return False if none may be closed."""
        waiting = [connection for connection in self.connections if connection.evictable]
        if waiting:
            min(waiting, key=lambda connection: connection.since).transport.abort()
        return bool(waiting)

    def report(self, error: OSError) -> None:
        """Log a failure to accept, at most once in REPORT seconds."""
        now = asyncio.get_running_loop().time()
        if now - self.reported > REPORT:
            self.reported = now
            logger.warning("cannot accept a connection: %s; the server retries, and logs this once a minute", error)

"""Connections: how many there are at a time, and how long each may keep the server waiting."""

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

MOST = 2048  # connections, where nothing else is asked for
SPARE_FILES = 256  # file descriptors that are left to the rest of the process, at most half of all
BACKLOG = 2048  # connections that the kernel holds until they are accepted
RETRY = 0.5  # seconds between attempts to accept, after one that failed
POLL = 0.01  # seconds between looks for room, where every connection is at work
REPORT = 60.0  # seconds between two lines about such failures
# What the server may wait for -> seconds that a client has for it. body.py limits the time of a body.
LIMITS = {"headers": 30.0, "reading": 60.0}
PAUSE = 1.0  # seconds of waiting for a client after which a newcomer may take its place
IDLE = 5  # seconds until a connection without a request is closed


def max_connections(asked: int | None) -> int:
    """Return the number of connections: `asked`, else MOST, or fewer where the process may not open as many files.

    Raises: UserError for more than the process may open.
    """
    files = may_open((asked or MOST) + SPARE_FILES)
    room = max(files - SPARE_FILES, files // 2, 1)
    if asked is not None and asked > room:
        why = f"this process may open {files} files, and needs some itself; `ulimit -n` raises that"
        raise UserError(f"max_connections={asked} is above {room}: {why}")
    return asked or min(MOST, room)


def may_open(wanted: int) -> int:
    """Raise the process's limit of open files to `wanted`, as far as it may -> the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if raised > soft:
        with contextlib.suppress(ValueError, OSError):  # of a system whose own limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            return raised
    return soft


class Connection(H11Protocol):
    """One client's connection. It ends where the client keeps the server waiting for too long.

    awaited: what the server waits for: "headers", "body", or "reading" of what was written. None: for nothing.
    since: when that began, in the loop's seconds.
    last: whether the answer under way, or the next, is the last.
    """

    awaited: str | None = None
    since = 0.0
    last = False
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause_writing is then called as soon as anything is left unread
        self.look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.wait_for(None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.look()

    def look(self) -> None:
        """Note what the server waits for now."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.last and self.cycle.keep_alive:
            self.cycle.keep_alive = False
            self.cycle.scope["headers"] = [*self.cycle.scope["headers"], CLOSE_HEADER]  # as if the client had asked
        if self.flow.write_paused:
            self.wait_for("reading")
        elif not answering:
            self.wait_for("headers")
        else:
            self.wait_for("body" if self.cycle.more_body else None)

    def wait_for(self, awaited: str | None) -> None:
        """Start the time limit, where this is not what the server waits for already."""
        if awaited == self.awaited:
            return
        if self.timer is not None:
            self.timer.cancel()
        seconds = LIMITS.get(awaited or "")
        self.timer = None if seconds is None else self.loop.call_later(seconds, self.end)
        self.awaited, self.since = awaited, self.loop.time()

    @property
    def may_go(self) -> bool:
        """Whether a newcomer may take the connection's place."""
        return self.awaited is not None and self.loop.time() - self.since > PAUSE

    def close_after_answer(self) -> None:
        """Make the answer under way the last, or else the next. Its client is told, unless it has begun."""
        self.last = True
        self.look()

    def end(self) -> None:
        """End the connection, its time being over."""
        if self.awaited == "headers" and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self.refuse(Refusal(408, f"the headers did not arrive within {LIMITS['headers']:g} seconds"))
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 cannot read."""
        self.refuse(Refusal(400, "what was sent is no HTTP/1.1 request, or its headers are too long"))

    def refuse(self, refusal: Refusal) -> None:
        """Answer before there is a request, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way
            answer = refusal.response()
            reason = http.HTTPStatus(refusal.status).phrase
            head = h11.Response(
                status_code=refusal.status, headers=[*answer.raw_headers, CLOSE_HEADER], reason=reason.encode()
            )
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Listener(uvicorn.Server):
    """A server that accepts its connections itself, at most `most` at a time.

    asyncio's own loop accepts thousands in one turn, and reports each failure to do so.
    """

    def __init__(self, config: uvicorn.Config, most: int) -> None:
        super().__init__(config)
        self.most, self.reported = most, -math.inf
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
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # such as no file descriptor being left
                self.report(error)
                await asyncio.sleep(RETRY)
                self.evict()
            else:
                await self.take(accepted)

    async def take(self, accepted: socket.socket) -> None:
        """Make a connection of a socket, as soon as there is room for it."""
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
            if not isinstance(error, OSError):  # which says that the client is gone
                raise

    @property
    def connections(self) -> set[Connection]:
        return self.server_state.connections  # type: ignore[return-value]

    def connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def evict(self) -> bool:
        """End the connection that has kept the server waiting the longest -> whether there was one."""
        waiting = [connection for connection in self.connections if connection.may_go]
        if waiting:
            min(waiting, key=lambda connection: connection.since).transport.abort()
        return bool(waiting)

    def report(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self.reported > REPORT:
            self.reported = now
            logger.warning("cannot accept a connection: %s; it is tried again, and said once a minute", error)

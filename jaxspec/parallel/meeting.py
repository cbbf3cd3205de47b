"""The rendezvous of a job's processes: all connect to process 0 and introduce themselves by a first message.

Other programs may connect to that port too. Such a connection is reported in one line and closed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Generator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.progress import write_line
from jaxspec.parallel.peers import connection, difference

MOST_PROCESSES = 4096
MAX_UNKNOWN_CONNECTIONS = 64  # largest number of connections, beyond one per process, that wait for a first message
LARGEST = 1 << 16  # largest size of a message in bytes
HEADER = 4  # number of bytes that hold a message's size, in the form of multiprocessing's connections
PATIENCE = 5.0  # seconds that a connection has for its first message, and that sending a message may take
RETRY = 0.2  # seconds between a failed attempt to connect or to accept a connection and the next attempt
LATER = 5.0  # most seconds for which process 0 goes on after a refusal, so that further processes receive it too
OTHER = "it speaks another protocol"


def address(text: Any) -> tuple[str, int]:
    """Parse "HOST:PORT". Raise UserError for a text of another form."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"coordinator={quoted(text)} must be HOST:PORT, such as 10.0.0.1:8476")
    return host.strip("[]"), int(port)


class UnknownConnection(Exception):
    """The error for a connection that is not from a process of this job. Its message gives the reason."""


class Frame:
    """A message that arrives piece by piece: first its size, then JSON. until: deadline (time.monotonic)."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.data = b""

    def read(self, sock: socket.socket) -> bool:
        """Read the available bytes of the message, and none beyond its end. Return whether the message is complete.

        Raises: UnknownConnection if the size is invalid or the connection was closed, OSError as the socket does.
        """
        while missing := self.size - len(self.data):
            try:
                piece = sock.recv(missing)
            except BlockingIOError:
                return False
            if not piece:
                raise UnknownConnection("it closed the connection")
            self.data += piece
        return True

    @property
    def size(self) -> int:
        """Number of bytes of the message with its header. Before the header is complete, this is the header's size."""
        if len(self.data) < HEADER:
            return HEADER
        size = int.from_bytes(self.data[:HEADER], "big", signed=True)
        if not 0 <= size <= LARGEST:
            raise UnknownConnection(OTHER)
        return HEADER + size

    def content(self) -> dict[str, Any]:
        """Parse the complete message. Raise UnknownConnection unless it is a JSON object."""
        try:
            content = json.loads(self.data[HEADER:])
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise UnknownConnection(OTHER)
        return content


class Caller:
    """A connection to process 0 whose first message has not arrived yet. until: deadline of that message."""

    def __init__(self, sock: socket.socket, host: str, until: float) -> None:
        self.sock = sock
        self.host = host
        self.frame = Frame(until)

    def hello(self) -> tuple[int, dict[str, str]] | None:
        """Return the caller's process number and its values, or None if its first message is not complete yet.

        Raises: UnknownConnection or OSError as `Frame.read` does, UnknownConnection for a message of another form.
        """
        if not self.frame.read(self.sock):
            return None
        values = self.frame.content()
        rank = values.pop("process_id", None)
        if type(rank) is not int or not 0 <= rank < MOST_PROCESSES or "num_processes" not in values:
            raise UnknownConnection(OTHER)
        if not all(isinstance(value, str) for value in values.values()):
            raise UnknownConnection(OTHER)
        return rank, values


class Callers:
    """The connections to process 0 whose first message has not arrived yet.

    server: listening socket.
    until: function that returns the time (time.monotonic) at which the rendezvous ends.
    most: largest number of these connections at a time.
    """

    def __init__(self, server: socket.socket, until: Callable[[], float], most: int) -> None:
        self.server = server
        self.until = until
        self.most = most
        self.open: dict[socket.socket, Caller] = {}  # open connections, the oldest first
        self.reported: set[str] = set()  # hosts from which a refused connection was reported

    def accept(self) -> None:
        """Accept a connection if there is one. Refuse the oldest open connection if there are too many."""
        try:
            sock, (host, *_) = self.server.accept()
        except BlockingIOError:
            return
        except OSError as error:  # for example too many open files: the oldest connection is closed to make room
            if self.open:
                self.refuse(self.oldest, error)
            time.sleep(RETRY)
            return
        sock.setblocking(False)
        self.open[sock] = Caller(sock, host, min(time.monotonic() + PATIENCE, self.until()))
        if len(self.open) > self.most:
            self.refuse(self.oldest, "too many connections at once")

    @property
    def oldest(self) -> Caller:
        return next(iter(self.open.values()))

    def refuse(self, caller: Caller, why: object) -> None:
        """Close a connection because of `why`, and report the first such connection of each host."""
        del self.open[caller.sock]
        caller.sock.close()
        if caller.host not in self.reported:
            self.reported.add(caller.host)
            write_line(f"{caller.host} connected, but is not a process of this job: {why}")

    def refuse_late(self, now: float) -> None:
        """Refuse the connections whose first message is not complete in time."""
        for caller in list(self.open.values()):
            if caller.frame.until <= now:
                self.refuse(caller, f"it sent no complete message within {PATIENCE:g} seconds")

    def deadline(self) -> float:
        """Return the time at which the next connection is late, or the rendezvous ends if that is earlier."""
        return min([self.until(), *(caller.frame.until for caller in self.open.values())])

    def hello(self, sock: socket.socket) -> tuple[int, dict[str, str]] | None:
        """Return the result of `Caller.hello` for a connection, or None for one that is refused."""
        caller = self.open.get(sock)
        if caller is None:  # true for a connection that was just refused to make room
            return None
        try:
            found = caller.hello()
        except (UnknownConnection, OSError) as error:
            self.refuse(caller, error)
            return None
        if found is not None:
            del self.open[sock]
        return found


def hellos(
    server: socket.socket, until: Callable[[], float], most: int
) -> Generator[tuple[socket.socket, int, dict[str, str]]]:
    """Yield (connection, process number, values) of each process that introduces itself before the time `until()`.

    A connection has PATIENCE seconds for its message. If more than `most` connections wait, the oldest is refused.
    """
    callers = Callers(server, until, most)
    server.setblocking(False)
    try:
        while (now := time.monotonic()) < until():
            callers.refuse_late(now)
            sock: Any
            for sock in wait([server, *callers.open], callers.deadline() - now):
                if sock is server:
                    callers.accept()
                elif found := callers.hello(sock):
                    yield sock, *found
    finally:
        for sock in callers.open:
            sock.close()


def gather(
    where: str, count: int, rank: int, timeout: float, mine: Mapping[str, str]
) -> tuple[int, dict[int, Connection]]:
    """Wait as process 0 for the other processes and check their values; return (port for JAX, connections by process).

    If a process has other values, or a process number that is invalid or taken, all processes are refused. Process 0
    then waits for at most LATER more seconds for the rest. Every process that has connected gets the reason.

    mine: values that must be equal in all processes.

    Raises: UserError if the processes are refused or one does not connect. Those that have connected raise it too.
    """
    mine = {**mine, "num_processes": str(count)}
    found: dict[int, socket.socket] = {}
    come: list[socket.socket] = []
    refusal = ""
    until = time.monotonic() + timeout
    server = listen(where, count)
    calls = hellos(server, lambda: until, count + MAX_UNKNOWN_CONNECTIONS)
    with server, contextlib.closing(calls):
        while len(come) < count - 1:
            call = next(calls, None)
            if call is None:
                break
            sock, their_rank, values = call
            line = difference(mine, values, their_rank)
            if line is None and (their_rank in found or not 0 < their_rank < count):
                line = f"two processes have process_id={their_rank}: give each its own"
            come.append(sock)
            found[their_rank] = sock
            if line is not None and not refusal:
                refusal = line
                until = min(until, time.monotonic() + LATER)
    if len(come) < count - 1 and not refusal:
        missing = next(i for i in range(1, count) if i not in found)
        refusal = (
            f"process {missing} did not connect to {where} within {timeout:g} seconds: start all, or raise join_timeout"
        )
    if refusal:
        for sock in come:
            send(sock, {"refused": refusal})
            sock.close()
        raise UserError(refusal)
    port = free_port(where)
    for sock in found.values():
        send(sock, {"port": port})
    return port, {other: connection(sock) for other, sock in found.items()}


def listen(where: str, backlog: int) -> socket.socket:
    """Return a socket that listens at `where` ("HOST:PORT"). Raise UserError if that is impossible."""
    host, port = address(where)
    try:
        return socket.create_server((host, port), family=family(host), backlog=backlog)
    except OSError as error:
        line = f"process 0 cannot listen at {where} ({error}): give its own address, and a free port"
        raise UserError(line) from None


def free_port(where: str) -> int:
    """Return a free port of the host in `where` ("HOST:PORT")."""
    host, _ = address(where)
    with socket.create_server((host, 0), family=family(host)) as free:
        return int(free.getsockname()[1])


def visit(
    where: str, count: int, rank: int, timeout: float, mine: Mapping[str, str]
) -> tuple[int, dict[int, Connection]]:
    """Connect to process 0 from another process; return (port for JAX, {0: connection to process 0}).

    Raises: UserError if process 0 does not answer or refuses this process.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            sock = socket.create_connection(address(where), timeout=max(until - time.monotonic(), 1e-3))
            break
        except OSError as error:  # for example process 0 does not listen yet, or its host name is not known yet
            reason = str(error)
        if time.monotonic() + RETRY > until:
            raise UserError(
                f"process 0 did not answer at {where} within {timeout:g} seconds ({reason}): start it, or raise "
                "join_timeout"
            )
        time.sleep(RETRY)
    with sock:
        send(sock, {**mine, "num_processes": str(count), "process_id": rank})
        try:
            answer = receive(sock, until + timeout)  # later than `until`: process 0 may still wait for other processes
            if "refused" in answer:
                raise UserError(str(answer["refused"]))
            if type(answer.get("port")) is not int:
                raise UnknownConnection(OTHER)
        except (UnknownConnection, OSError) as error:
            line = f"process 0 at {where} closed the connection before all had joined ({error}): see its output"
            raise UserError(line) from None
        return answer["port"], {0: connection(sock)}


def family(host: str) -> socket.AddressFamily:
    """Return the address family of a host: IPv6 for an IPv6 address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def send(other: socket.socket, content: Mapping[str, Any]) -> None:
    """Send a message. Errors of the socket are ignored, because the other side reports a lost connection."""
    message = json.dumps(content).encode()
    with contextlib.suppress(OSError):
        other.settimeout(PATIENCE)
        other.sendall(len(message).to_bytes(HEADER, "big", signed=True) + message)


def receive(other: socket.socket, until: float) -> dict[str, Any]:
    """Return the message that arrives before the time `until`. Raise UnknownConnection if no valid one does."""
    frame = Frame(until)
    other.setblocking(False)
    while not frame.read(other):
        if not wait([other], max(until - time.monotonic(), 0)):
            raise UnknownConnection("it sent nothing in time")
    return frame.content()

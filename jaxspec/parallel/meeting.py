"""How the processes of a job find each other: all call process 0 and say which they are. Anybody else may call there,
too: a stranger costs a line and its connection."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Generator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.progress import say
from jaxspec.parallel.peers import connection, difference

MOST_PROCESSES = 4096
MOST_STRANGERS = 64  # connections that have not said who they are
LARGEST = 1 << 16  # bytes of what is said here
HEADER = 4  # bytes: the size, as multiprocessing's connections send it
PATIENCE = 5.0  # seconds, in which a caller has to say who it is
RETRY = 0.2  # seconds
LATER = 5.0  # seconds, in which those that come after a refusal are told of it
OTHER = "it says something else"


def address(text: Any) -> tuple[str, int]:
    """ "HOST:PORT" -> both. Raises UserError for what is none."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"coordinator={quoted(text)} must be HOST:PORT, such as 10.0.0.1:8476")
    return host.strip("[]"), int(port)


class Stranger(Exception):
    """Who is there is no process of this job; the text says how that is known."""


class Frame:
    """What one side says: a size and JSON, which may come in any pieces, until a time."""

    def __init__(self, until: float) -> None:
        self.until, self.data = until, b""

    def read(self, sock: socket.socket) -> bool:
        """Take what has come of the frame, and nothing behind it; return whether it is whole. Raises Stranger where it
        cannot become one, OSError as the socket does."""
        while missing := self.size - len(self.data):
            try:
                piece = sock.recv(missing)
            except BlockingIOError:
                return False
            if not piece:
                raise Stranger("it hung up")
            self.data += piece
        return True

    @property
    def size(self) -> int:
        """Bytes of the frame, as far as is known."""
        if len(self.data) < HEADER:
            return HEADER
        size = int.from_bytes(self.data[:HEADER], "big", signed=True)
        if not 0 <= size <= LARGEST:
            raise Stranger(OTHER)
        return HEADER + size

    def said(self) -> dict[str, Any]:
        try:
            said = json.loads(self.data[HEADER:])
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise Stranger(OTHER)
        return said


class Caller:
    """Who called process 0, and has not said yet which process it is."""

    def __init__(self, sock: socket.socket, host: str, until: float) -> None:
        self.sock, self.host, self.frame = sock, host, Frame(until)

    def hello(self) -> tuple[int, dict[str, str]] | None:
        """Return which process it is, and what it has; None before all of it has come. Raises as `Frame.read`."""
        if not self.frame.read(self.sock):
            return None
        has = self.frame.said()
        rank = has.pop("process_id", None)
        if type(rank) is not int or not 0 <= rank < MOST_PROCESSES or "num_processes" not in has:
            raise Stranger(OTHER)
        if not all(isinstance(value, str) for value in has.values()):
            raise Stranger(OTHER)
        return rank, has


def hellos(
    server: socket.socket, until: Callable[[], float], most: int
) -> Generator[tuple[socket.socket, int, dict[str, str]]]:
    """Yield (connection, process, what it has) of each process that calls before `until()`. A caller has PATIENCE
    seconds in all to say which one it is, and holds nobody up; of more than `most` the first has to go."""
    callers: dict[socket.socket, Caller] = {}
    reported: set[str] = set()
    server.setblocking(False)

    def refuse(caller: Caller, why: object) -> None:
        del callers[caller.sock]
        caller.sock.close()
        if caller.host not in reported:  # a line for each
            reported.add(caller.host)
            say(f"{caller.host} called, and is no process of this job: {why}")

    def accept() -> None:
        try:
            sock, (host, *_) = server.accept()
        except BlockingIOError:
            return
        except OSError as error:  # as many are open as may be
            for first in list(callers.values())[:1]:
                refuse(first, error)
            time.sleep(RETRY)
            return
        sock.setblocking(False)
        callers[sock] = Caller(sock, host, min(time.monotonic() + PATIENCE, until()))
        if len(callers) > most:
            refuse(next(iter(callers.values())), "too many call at once")

    try:
        while (now := time.monotonic()) < until():
            for late in [caller for caller in callers.values() if caller.frame.until <= now]:
                refuse(late, f"it said nothing whole within {PATIENCE:g} seconds")
            ends = min([until(), *(caller.frame.until for caller in callers.values())])
            sock: Any
            for sock in wait([server, *callers], ends - now):
                if sock is server:
                    accept()
                elif caller := callers.get(sock):  # else it had to go
                    try:
                        found = caller.hello()
                    except (Stranger, OSError) as error:
                        refuse(caller, error)
                        continue
                    if found:
                        yield callers.pop(sock).sock, *found
    finally:
        for sock in callers:
            sock.close()


def gather(
    where: str, count: int, rank: int, timeout: float, mine: Mapping[str, str]
) -> tuple[int, dict[int, Connection]]:
    """Process 0 waits for the others, and looks whether they belong here -> (port for JAX, by process the way to it).
    Raises UserError, in all of them, where one does not, or does not come."""
    host, port = address(where)
    mine = {**mine, "num_processes": str(count)}
    found: dict[int, socket.socket] = {}
    come: list[socket.socket] = []
    refusal, until = "", time.monotonic() + timeout
    try:
        server = socket.create_server((host, port), family=family(host), backlog=count)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at {where} ({error}): give its own address, and a free port"
        ) from None
    calls = hellos(server, lambda: until, count + MOST_STRANGERS)
    with server, contextlib.closing(calls):
        while len(come) < count - 1 and (call := next(calls, None)):
            sock, their_rank, has = call
            line = difference(mine, has, their_rank)
            if their_rank in found or not 0 < their_rank < count:
                line = line or f"two processes have process_id={their_rank}: give each its own"
            come.append(sock)
            found[their_rank] = sock
            if line and not refusal:
                refusal, until = line, min(until, time.monotonic() + LATER)
    if len(come) < count - 1:
        missing = next(i for i in range(1, count) if i not in found)
        refusal = refusal or (
            f"process {missing} did not come to {where} within {timeout:g} seconds: start all, or raise join_timeout"
        )
    if refusal:
        for sock in come:
            tell(sock, {"refused": refusal})
            sock.close()
        raise UserError(refusal)
    with socket.create_server((host, 0), family=family(host)) as free:
        number = free.getsockname()[1]
    for other in found.values():
        tell(other, {"port": number})
    return number, {other: connection(sock) for other, sock in found.items()}


def visit(
    where: str, count: int, rank: int, timeout: float, mine: Mapping[str, str]
) -> tuple[int, dict[int, Connection]]:
    """As `gather`, for another process than 0."""
    until, reason = time.monotonic() + timeout, "no answer"
    while True:
        try:
            sock = socket.create_connection(address(where), timeout=max(until - time.monotonic(), 1e-3))
            break
        except OSError as error:  # it is not there yet, nor perhaps its name
            reason = str(error)
        if time.monotonic() + RETRY > until:
            raise UserError(
                f"process 0 did not answer at {where} within {timeout:g} seconds ({reason}): start it, or raise "
                "join_timeout"
            )
        time.sleep(RETRY)
    with sock:
        tell(sock, {**mine, "num_processes": str(count), "process_id": rank})
        try:
            told = heard(sock, until + timeout)  # it may wait for others
            if "refused" in told:
                raise UserError(str(told["refused"]))
            if type(told.get("port")) is not int:
                raise Stranger(OTHER)
        except (Stranger, OSError) as error:
            line = f"process 0 at {where} went away before all were there ({error}): see what it says"
            raise UserError(line) from None
        return told["port"], {0: connection(sock)}


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def tell(other: socket.socket, said: Mapping[str, Any]) -> None:
    frame = json.dumps(said).encode()
    with contextlib.suppress(OSError):
        other.settimeout(PATIENCE)
        other.sendall(len(frame).to_bytes(HEADER, "big", signed=True) + frame)


def heard(other: socket.socket, until: float) -> dict[str, Any]:
    """Return what the other side says by then. Raises Stranger where it does not."""
    frame = Frame(until)
    other.setblocking(False)
    while not frame.read(other):
        if not wait([other], max(until - time.monotonic(), 0)):
            raise Stranger("it said nothing in time")
    return frame.said()

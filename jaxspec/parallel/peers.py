"""What the processes of one job say to each other, over TCP. Process 0 tells the others what to do, and they do it.
Whichever fails says why, and all end: a pass that one of them does not run would keep the others waiting for ever."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from jaxspec.common.errors import Terminated, UserError, said, shortened
from jaxspec.common.progress import say

# The first byte of a frame: a plan; values to compare; why all end; process 0 is done; process 0 is to end.
PLAN, VALUES, FAILED, DONE, STOP = (bytes([kind]) for kind in range(5))
LARGEST = 1 << 30  # bytes of a frame
PATIENCE = 1.0  # seconds
SILENCE = 30  # seconds after which a machine that does not answer is lost


def connection(sock: socket.socket) -> Connection:
    """Frames over a socket that notices where the other machine is lost."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 1000 * SILENCE}
    for name, value in wanted.items():
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(sock.detach())


class Peers:
    """The other processes: for process 0 all of them, for these process 0.

    rank: this process's number.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection]) -> None:
        self.rank, self.connections = rank, dict(connections)
        self.inbox: dict[int, SimpleQueue[bytes]] = {other: SimpleQueue() for other in connections}
        self.gone = {other: threading.Event() for other in connections}
        self.sending = {other: threading.Lock() for other in connections}
        self.ending = threading.Lock()  # whoever has it ends the process, in its own words
        self.done = self.taken = False
        for other in connections:
            threading.Thread(target=self.listen, args=(other,), name=f"process-{other}", daemon=True).start()
        if rank == 0:
            atexit.register(self.finish)

    # Process 0 says what is to be done, and the others do it.

    def take(self) -> None:
        """Raises UserError where something in this job is told already what to do."""
        if self.taken:
            raise UserError("these processes run a model already: one LLM is made in a job of several processes")
        self.taken = True

    def tell(self, plan: bytes) -> None:
        for other in self.connections:
            self.send(other, PLAN + plan)

    def follow(self, execute: Callable[[bytes], Any]) -> None:
        """Does what process 0 tells, until that one is done. A signal to end is passed on to process 0, which may have
        something to bring to its end, and ends all."""
        first: list[float] = []

        def stop(number: int, frame: Any) -> None:
            if not first:
                first.append(time.monotonic())
                self.send(0, STOP + bytes([number]))
            elif time.monotonic() - first[0] > PATIENCE:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        main = threading.current_thread() is threading.main_thread()
        before = {kind: signal.signal(kind, stop) for kind in (signal.SIGINT, signal.SIGTERM) if main}
        with self.together():
            while (frame := self.inbox[0].get())[:1] == PLAN:
                execute(frame[1:])
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def finish(self) -> None:
        """Process 0 is done, and the others may leave; they say why where an error ended it. (Where a person types, one
        is remembered from long ago.)"""
        self.done, error = True, None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        frame = DONE if error is None else FAILED + json.dumps([f"process 0 failed: {said(error)}", 1]).encode()
        for other in self.connections:
            with contextlib.suppress(OSError):
                self.send(other, frame)

    # All have to be alike.

    def agree(self, values: Mapping[str, Any]) -> None:
        """Ends all where a process has another value than process 0."""
        mine = {name: str(value) for name, value in values.items()}
        if self.rank:
            self.send(0, VALUES + json.dumps(mine).encode())
            return
        for other, inbox in self.inbox.items():
            if line := difference(mine, json.loads(inbox.get()[1:]), other):
                self.end(line, 2)

    # The ends.

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong inside goes wrong for all."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        time.sleep(PATIENCE)  # where another was lost this is what came of it, and what ends all is that
        what = "was interrupted" if isinstance(error, KeyboardInterrupt) else None
        if what is None and not isinstance(error, UserError | OSError) and not self.ending.locked():
            traceback.print_exception(error)
            what = f"failed: {said(error)}"
        self.end(f"process {self.rank} {what}" if what else f"process {self.rank}: {error}", status_of(error))

    def end(self, line: str, status: int, *, said: bool = False) -> NoReturn:
        """Ends this process, and the others. At once: what runs on a device without all of them has no end. said: this
        process has said why."""
        if not self.ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to end it
        if threading.current_thread() is threading.main_thread():  # a second signal is not to cut this off
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        line = " ".join(line.split())
        for other in self.connections:
            with contextlib.suppress(OSError):
                self.send(other, FAILED + json.dumps([line, status]).encode())
        if not said:
            say(f"jaxspec: {line}: all processes end", always=True)
        if self.rank == 0:  # jax's service is in this process: the others would tell of its end, at length
            until = time.monotonic() + 2 * PATIENCE
            for event in self.gone.values():
                event.wait(max(until - time.monotonic(), 0))
        end_at_once(status)

    def send(self, other: int, frame: bytes) -> None:
        if not self.sending[other].acquire(timeout=PATIENCE):
            raise OSError(f"process {other} does not listen")
        try:
            self.connections[other].send_bytes(frame)
        except OSError:
            if not self.ending.locked() and not self.done:
                self.end(f"process {other} was lost", 1)
            raise
        finally:
            self.sending[other].release()

    def listen(self, other: int) -> None:
        """What the other process says; a thread of its own, so that it is heard whatever the others do."""
        try:
            while True:
                frame = self.connections[other].recv_bytes(LARGEST)
                kind, rest = frame[:1], frame[1:]
                if kind == FAILED:
                    if not self.ending.locked():  # else it answers this one's own end, and all that is left is its own
                        self.end(*json.loads(rest))
                    continue
                if kind == STOP:
                    os.kill(os.getpid(), rest[0])
                    continue
                self.done |= kind == DONE
                self.inbox[other].put(frame)
        except (EOFError, OSError):
            self.gone[other].set()
            if not self.done:
                self.end(f"process {other} was lost", 1)


def end_at_once(status: int) -> NoReturn:
    """Without what Python does at the end of a process, but nothing that was printed is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def status_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 143 if isinstance(error, Terminated) else 130
    return 2 if isinstance(error, UserError | OSError) else 1


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], other: int) -> str | None:
    """The first value that differs between process 0 and another, in words."""
    for name in dict.fromkeys([*mine, *theirs]):
        here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            here, there = shortened(here, 200), shortened(there, 200)
            return f"process {other} has {name}={there}, process 0 {here}: start all with the same"
    return None

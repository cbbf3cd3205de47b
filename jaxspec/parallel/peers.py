"""The messages between the processes of one job, over TCP.

Process 0 sends plans (device programs to run, with their arguments), and the other processes execute them. A process
that fails sends the reason, and all processes end: a program that one process does not run would keep the others
waiting for ever.
"""

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

from jaxspec.common.errors import Terminated, UserError, error_line, shortened
from jaxspec.common.progress import write_line

# The first byte of a message gives its kind.
PLAN = b"\x00"  # message with a plan to execute
VALUES = b"\x01"  # message with values that process 0 compares with its own
FAILED = b"\x02"  # message with the reason for which all processes end, and their exit status
DONE = b"\x03"  # message that process 0 is done
STOP = b"\x04"  # message with the number of a signal that process 0 has to raise

LARGEST = 1 << 30  # largest size of a message in bytes
# Seconds of waiting for news of a lost process, and for a connection on which another thread sends. A signal counts as
# the user's second one only if it comes more than this many seconds after the first.
PATIENCE = 1.0
SILENCE = 30  # seconds without an answer after which another machine is considered lost


def connection(sock: socket.socket) -> Connection:
    """Return a connection for messages over this socket. The socket is set to detect the loss of the other machine."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 1000 * SILENCE}
    for name, value in wanted.items():
        if hasattr(socket, name):  # false for options that the system does not have
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(sock.detach())


class Peers:
    """The connections of this process: in process 0 to all others, in any other process to process 0.

    rank: number of this process.
    connections: connections by the number of the process at the other end.
    inbox: received messages of each connected process, except failures and signals.
    gone: event for each connected process, set when its connection has ended.
    sending: lock for each connection, held while a message is sent.
    ending: lock that a thread takes, and keeps, to end this process.
    done: whether process 0 is done, so that a connection may end without an error.
    taken: whether a model uses these processes.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection]) -> None:
        self.rank = rank
        self.connections = dict(connections)
        self.inbox: dict[int, SimpleQueue[bytes]] = {other: SimpleQueue() for other in connections}
        self.gone = {other: threading.Event() for other in connections}
        self.sending = {other: threading.Lock() for other in connections}
        self.ending = threading.Lock()
        self.done = False
        self.taken = False
        for other in connections:
            threading.Thread(target=self.listen, args=(other,), name=f"process-{other}", daemon=True).start()
        if rank == 0:
            atexit.register(self.finish)

    # The following methods are about plans: process 0 sends them, the other processes execute them.

    def take(self) -> None:
        """Reserve the processes for one model. Raise UserError if a model uses them already."""
        if self.taken:
            raise UserError("these processes run a model already: make one LLM in a job of several processes")
        self.taken = True

    def send_plan(self, plan: bytes) -> None:
        """Send a serialised plan (a device program to run, with its arguments) to the other processes."""
        for other in self.connections:
            self.send(other, PLAN + plan)

    def follow(self, execute: Callable[[bytes], Any]) -> None:
        """Execute the plans (runs of device programs) that process 0 sends, until process 0 is done.

        execute: function that executes a serialised plan.

        The first SIGINT or SIGTERM is forwarded to process 0, which may have work to finish and then ends all
        processes. A further signal more than PATIENCE seconds later ends this process.
        """
        first: list[float] = []  # time of the first signal

        def stop(number: int, frame: Any) -> None:
            if not first:
                first.append(time.monotonic())
                self.send(0, STOP + bytes([number]))
            elif time.monotonic() - first[0] > PATIENCE:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        before = {}
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set signal handlers
            for kind in (signal.SIGINT, signal.SIGTERM):
                before[kind] = signal.signal(kind, stop)
        with self.together():
            while (message := self.inbox[0].get())[:1] == PLAN:
                execute(message[1:])
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def finish(self) -> None:
        """Inform the other processes, from process 0, that process 0 is done or which uncaught error ended it.

        In an interactive session sys.last_value is ignored, because it may be an old error.
        """
        self.done = True
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        message = DONE if error is None else failure(f"process 0 failed: {error_line(error)}", 1)
        for other in self.connections:
            with contextlib.suppress(OSError):
                self.send(other, message)

    # The following method compares values that must be equal in all processes.

    def agree(self, values: Mapping[str, Any]) -> None:
        """Compare values by name with those of process 0. If any differ, all processes end."""
        mine = {name: str(value) for name, value in values.items()}
        if self.rank != 0:
            self.send(0, VALUES + json.dumps(mine).encode())
            return
        for other, inbox in self.inbox.items():
            line = difference(mine, json.loads(inbox.get()[1:]), other)
            if line is not None:
                self.end(line, 2)

    # The following methods end all processes of the job.

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which any error ends all processes of the job."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an error in this one."""
        # The error may follow from the loss of another process. During this wait such a loss is detected and reported.
        time.sleep(PATIENCE)
        if isinstance(error, KeyboardInterrupt):
            line = f"process {self.rank} was interrupted"
        elif isinstance(error, UserError | OSError) or self.ending.locked():
            line = f"process {self.rank}: {error}"
        else:
            traceback.print_exception(error)
            line = f"process {self.rank} failed: {error_line(error)}"
        self.end(line, status_of(error))

    def end(self, line: str, status: int, *, reported: bool = False) -> NoReturn:
        """End this process and the others at once. A program that some of them do not run would never end.

        line: reason, in one line.
        status: exit status of all processes.
        reported: whether this process has printed the reason already.
        """
        if not self.ending.acquire(blocking=False):
            threading.Event().wait()  # waits for ever, because another thread is ending this process
        if threading.current_thread() is threading.main_thread():  # a second signal must not interrupt the messages
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        line = " ".join(line.split())
        for other in self.connections:
            with contextlib.suppress(OSError):
                self.send(other, failure(line, status))
        if not reported:
            write_line(f"jaxspec: {line}: all processes end", always=True)
        if self.rank == 0:
            # JAX's coordination service runs in process 0. The other processes must end before it, else they would
            # report the loss of the service.
            until = time.monotonic() + 2 * PATIENCE
            for event in self.gone.values():
                event.wait(max(until - time.monotonic(), 0))
        end_at_once(status)

    def send(self, other: int, message: bytes) -> None:
        """Send a message to another process. If that process is lost, all processes end.

        Raises: OSError if the message cannot be sent.
        """
        if not self.sending[other].acquire(timeout=PATIENCE):
            raise OSError(f"process {other} does not listen")
        try:
            self.connections[other].send_bytes(message)
        except OSError:
            if not self.ending.locked() and not self.done:
                self.end(f"process {other} was lost", 1)
            raise
        finally:
            self.sending[other].release()

    def listen(self, other: int) -> None:
        """Receive the messages of another process until its connection ends. Each connection has a thread for this."""
        try:
            while True:
                message = self.connections[other].recv_bytes(LARGEST)
                kind, rest = message[:1], message[1:]
                if kind == FAILED:
                    if not self.ending.locked():  # while this process ends, the message only repeats its own reason
                        self.end(*json.loads(rest))
                    continue
                if kind == STOP:
                    os.kill(os.getpid(), rest[0])
                    continue
                if kind == DONE:
                    self.done = True
                self.inbox[other].put(message)
        except (EOFError, OSError):
            self.gone[other].set()
            if not self.done:
                self.end(f"process {other} was lost", 1)


def failure(line: str, status: int) -> bytes:
    """Return the message that ends all processes. line: reason, in one line. status: exit status."""
    return FAILED + json.dumps([line, status]).encode()


def end_at_once(status: int) -> NoReturn:
    """Exit from the process without Python's cleanup. Printed output is flushed first."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def status_of(error: BaseException) -> int:
    """Return the exit status for an error: 130 for SIGINT, 143 for SIGTERM, 2 for UserError and OSError, else 1."""
    if isinstance(error, KeyboardInterrupt):
        return 143 if isinstance(error, Terminated) else 130
    return 2 if isinstance(error, UserError | OSError) else 1


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], other: int) -> str | None:
    """Return a message about the first value that differs between process 0 and another process, or None.

    mine: values of process 0 by name.
    theirs: values of the other process by name.
    other: number of the other process.
    """
    for name in dict.fromkeys([*mine, *theirs]):
        here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            here, there = shortened(here, 200), shortened(there, 200)
            return f"process {other} has {name}={there}, process 0 {here}: start all with the same"
    return None

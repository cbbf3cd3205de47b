"""Whoever calls process 0 and is no process of the job costs a line and that connection, and nobody waits for it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec import UserError
from jaxspec.parallel import meeting
from jaxspec.parallel.meeting import Caller, UnknownConnection, gather, hellos, visit
from tests.parallel.test_job import free_address

LONG = 300.0  # seconds, for what comes at once unless the machine is busy
ALIKE = {"jaxspec": "1", "jax": "2"}
HELLO = {**ALIKE, "num_processes": "2", "process_id": 1}


def frame(said: bytes) -> bytes:
    return len(said).to_bytes(4, "big") + said


STRANGERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "half a size": b"\x00\x00",
    "half a frame": b"\x00\x00\x00\x20{",
    "a negative size": b"\xff\xff\xff\xff",
    "too much": b"\x7f\xff\xff\xff",
    "no JSON": frame(b"\xff\xfe"),
    "no object": frame(b"[]"),
    "deeply nested": frame(b"[" * 30_000),
    "deeply nested values": frame(b'{"jax":' * 9_000),
    "no process": frame(b"{}"),
    "of no job": frame(b'{"process_id": 1}'),
    "a process that is no number": frame(json.dumps(HELLO | {"process_id": "1"}).encode()),
    "a process that is true": frame(json.dumps(HELLO | {"process_id": True}).encode()),
    "a process that is huge": frame(json.dumps(HELLO | {"process_id": 10**4000}).encode()),
    "a process below 0": frame(json.dumps(HELLO | {"process_id": -1}).encode()),
    "values of other types": frame(json.dumps(HELLO | {"jax": ["2"]}).encode()),
    "a number for a version": frame(json.dumps(HELLO | {"num_processes": 2}).encode()),
    "null": frame(json.dumps(HELLO | {"jax": None}).encode()),
}


class Job:
    """Process 0 in a thread, waiting for process 1."""

    def __init__(self, timeout: float = LONG) -> None:
        self.where, self.found = free_address(), []
        self.thread = threading.Thread(target=self.run, args=(timeout,), daemon=True)
        self.thread.start()

    def run(self, timeout: float) -> None:
        try:
            self.found.append(gather(self.where, 2, 0, timeout, ALIKE))
        except BaseException as error:
            self.found.append(error)

    def call(self) -> socket.socket:
        """Connect to it; it may not listen yet."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(meeting.address(self.where), timeout=LONG)

    def joined(self) -> bool:
        """Let process 1 come, and return whether both have met."""
        port, _ = visit(self.where, 2, 1, LONG, ALIKE)
        self.thread.join(LONG)
        return self.found[0][0] == port


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_costs_a_line_and_its_connection(kind, capsys):
    job = Job()
    with job.call() as sock, contextlib.suppress(OSError):  # it may have been closed meanwhile
        sock.sendall(STRANGERS[kind])
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"", "it was answered"
    assert job.joined()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("127.0.0.1 called, and is no process of this job: it ")


def test_strangers_that_stay_hold_nobody_up():
    """Silent, or in the middle of what they say."""
    job = Job()
    with contextlib.ExitStack() as stack:
        for kind in ("nothing", "half a size", "half a frame"):
            stack.enter_context(job.call()).sendall(STRANGERS[kind])
        assert job.joined()


@given(said=st.binary(max_size=40) | st.binary(max_size=40).map(frame), ended=st.booleans())
def test_any_bytes(said, ended):
    check(said, ended)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
near = st.fixed_dictionaries({name: st.just(value) | json_values for name, value in HELLO.items()})


@given(said=json_values | near, ended=st.booleans())
def test_any_json(said, ended):
    check(frame(json.dumps(said).encode()), ended)


def check(said: bytes, ended: bool) -> None:
    """It is a hello, has not come in full, or is a stranger's; nothing else happens."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(said)
        if ended:
            theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(UnknownConnection):
            if (found := Caller(ours, "there", 0.0).hello()) is not None:
                rank, has = found
                assert type(rank) is int
                assert all(type(value) is str for value in has.values())


class Clock:
    """Time that passes only while somebody waits: each wait is told what has come, and takes `step` seconds."""

    def __init__(self, monkeypatch, step: float, meanwhile=lambda: None) -> None:
        self.now = 0.0
        monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        real = meeting.wait

        def wait(sockets, seconds):
            meanwhile()
            found = real(sockets, 0)
            self.now += min(step, seconds)
            return found

        monkeypatch.setattr(meeting, "wait", wait)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_byte_now_and_then_ends_when_the_time_is_over(monkeypatch, capsys):
    """Time counts in all, not for each byte: of a stranger, and of all of them one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        sent: list[int] = []  # by each that calls

        def trickle() -> None:
            with contextlib.suppress(OSError):
                callers[-1].sendall(long[sent[-1] :][:1])
                sent[-1] += 1
                return
            call()

        def call() -> None:
            callers.append(stack.enter_context(socket.create_connection(server.getsockname())))
            sent.append(0)

        callers: list[socket.socket] = []
        long = frame(b" " * 1000)
        call()
        clock = Clock(monkeypatch, 2.5, trickle)
        assert list(hellos(server, lambda: 60.0, 9)) == []
        assert 60.0 <= clock.now < 61.0
        assert len(sent) > 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("it said nothing whole within 5 seconds"), "a line for each host"


def test_process_0_waits_no_longer_than_it_was_told(monkeypatch):
    calls: list[socket.socket] = []
    clock = Clock(monkeypatch, 1.0, lambda: calls.append(socket.create_connection(meeting.address(where))))
    where = free_address()
    with pytest.raises(UserError, match=r"process 1 did not come to .* within 30 seconds"):
        gather(where, 2, 0, 30.0, ALIKE)
    assert 30.0 <= clock.now < 31.0
    for sock in calls:
        sock.close()


def test_too_many_at_once(monkeypatch, capsys):
    """The first has to go; who says at once who it is stays."""
    monkeypatch.setattr(meeting, "MAX_UNKNOWN_CONNECTIONS", 2)
    job = Job()
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(job.call()) for _ in range(6)]
        assert first.recv(1) == b""
        assert job.joined()
    assert "too many call at once" in capsys.readouterr().err


def test_no_file_is_left_for_a_connection(monkeypatch, capsys):
    """As `ulimit -n` has it: whoever has said nothing yet makes room."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        call = lambda: stack.enter_context(socket.create_connection(server.getsockname()))
        full = SimpleNamespace(setblocking=server.setblocking, fileno=server.fileno, accept=server.accept)
        Clock(monkeypatch, 0.01)
        silent, calls = call(), hellos(full, lambda: 60.0, 9)

        def accept():
            if not silent_is_gone():
                if accepted:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                accepted.append(True)
                call().sendall(frame(json.dumps(HELLO).encode()))
            return server.accept()

        def silent_is_gone() -> bool:
            silent.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return silent.recv(1) == b""
            return False

        accepted: list[bool] = []
        full.accept = accept
        sock, rank, _ = next(calls)
        assert rank == 1
        sock.close()
        calls.close()
    assert "Too many open files" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", frame(b"[]"), frame(b"{}"), frame(b'{"port": "8"}')]
)
def test_another_program_at_process_0s_place(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"process 0 at {where} went away before all were there"):
            visit(where, 2, 1, LONG, ALIKE)
        thread.join(LONG)

"""How the processes of a job find each other, and what they say: in threads of one process, over real sockets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import socket
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxspec import UserError, join_hosts
from jaxspec.engine.warming import plans
from jaxspec.parallel import hosts, peers
from jaxspec.parallel.hosts import Hosts
from jaxspec.parallel.meeting import Caller, address, gather, visit
from jaxspec.parallel.peers import Peers, difference
from jaxspec.parallel.placement import make_placement, shared
from jaxspec.runtime import wire
from jaxspec.runtime.packing import pack
from jaxspec.runtime.plans import Plan
from tests.parallel.test_job import free_address
from tests.support import lively_models

ALIKE = {"jaxspec": "1", "jax": "2"}
LONG = 300.0  # seconds


def outcomes(*calls):
    """What each gives, or raises, all at the same time."""
    found = [None] * len(calls)

    def run(i, call):
        try:
            found[i] = call()
        except UserError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=run, args=given, daemon=True) for given in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "one of them waits for ever"
    return found


def meeting(where, *ranks, count=3, others=None):
    """A call for each rank; others: rank -> what it has other than the rest."""
    for rank in ranks:
        own = {"count": count, "rank": rank, "timeout": LONG, "mine": ALIKE} | (others or {}).get(rank, {})
        yield functools.partial(visit if rank else gather, where, **own)


def test_they_meet_and_hear_each_other():
    where = free_address()
    (port, to_others), (same, to_first), (again, to_first_too) = outcomes(*meeting(where, 0, 1, 2))
    assert port == same == again
    assert (sorted(to_others), sorted(to_first)) == ([1, 2], [0])
    first, *rest = (Peers(i, ways) for i, ways in enumerate((to_others, to_first, to_first_too)))
    first.send_plan(b"a plan")
    heard: list[bytes] = []
    first.finish()
    for other in rest:
        other.follow(heard.append)
    assert heard == [b"a plan"] * 2


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({1: {"mine": ALIKE | {"jax": "3"}}}, "process 1 has jax=3, process 0 2: start all with the same"),
        ({1: {"mine": {"jax": "2"}}}, "process 1 has jaxspec=nothing, process 0 1: start all with the same"),
        ({1: {"count": 4}}, "process 1 has num_processes=4, process 0 3: start all with the same"),
        ({1: {"rank": 2}}, "two processes have process_id=2: give each its own"),
        ({1: {"rank": 7}}, "process_id=7"),
    ],
)
def test_who_does_not_belong_is_refused_by_all(others, line, monkeypatch):
    """Whoever comes after it is told, too."""
    monkeypatch.setattr("jaxspec.parallel.meeting.LATER", LONG)
    found = outcomes(*meeting(free_address(), 0, 1, 2, others=others))
    assert all(line in str(text) for text in found), found


def test_who_does_not_come(monkeypatch):
    """Process 0's time is over as soon as one of the others has come."""
    where, hello = free_address(), Caller.hello
    come: list[bool] = []

    def heard(self):
        if found := hello(self):
            come.append(True)
        return found

    clock = SimpleNamespace(monotonic=lambda: 10.0 if come else 0.0, sleep=time.sleep)
    with monkeypatch.context() as patched:
        patched.setattr(Caller, "hello", heard)
        patched.setattr("jaxspec.parallel.meeting.time", clock)
        first, second = outcomes(*meeting(where, 0, 2, others={0: {"timeout": 3.0}}))
    assert first == second
    assert first == f"process 1 did not connect to {where} within 3 seconds: start all, or raise join_timeout"
    (alone,) = outcomes(*meeting(where, 1, others={1: {"timeout": 0.5}}))
    assert f"process 0 did not answer at {where} within 0.5 seconds" in alone


def test_a_place_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        (line,) = outcomes(*meeting(where, 0))
    assert line.startswith(f"process 0 cannot listen at {where} (")
    assert line.endswith("give its own address, and a free port")


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02[]", b"\x7f\xff\xff\xff", b"\x00\x00"]
)
def test_strangers_are_not_heard(said):
    """Whatever else comes to the port, be it silent."""
    where, gone = free_address(), threading.Event()

    def stranger():
        while True:
            try:
                with socket.create_connection(address(where), timeout=LONG) as sock:
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                    assert not sock.recv(1), "it was answered"
            except ConnectionRefusedError:  # nobody listens yet
                continue
            except OSError:
                pass
            gone.set()
            return b""

    first, second = meeting(where, 0, 1, count=2)
    (port, _), (same, _), told = outcomes(first, lambda: gone.wait() and second(), stranger)
    assert (port, told) == (same, b"")


def test_values_that_differ_end_all(monkeypatch):
    where, ended = free_address(), []
    (_, to_other), (_, to_first) = outcomes(*meeting(where, 0, 1, count=2))
    first, second = Peers(0, to_other), Peers(1, to_first)
    monkeypatch.setattr(Peers, "end", lambda self, line, status, **_: ended.append((self.rank, line, status)))
    second.agree({"pages": 3})
    first.agree({"pages": 3})
    second.agree({"pages": 3})
    first.agree({"pages": 4})
    assert ended == [(0, "process 1 has pages=3, process 0 4: start all with the same", 2)]
    first.finish()
    second.follow(lambda plan: None)


def test_difference():
    assert difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, 1) is None
    assert difference({"a": "1"}, {"a": "2"}, 3) == "process 3 has a=2, process 0 1: start all with the same"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"coordinator": "host:1"}, "num_processes is missing: give all of coordinator, num_processes, process_id, or"),
        ({"process_id": 0}, "coordinator is missing"),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "coordinator='host' must be HOST:PORT"),
        ({"coordinator": "h:0", "num_processes": 2, "process_id": 0}, "coordinator='h:0' must be HOST:PORT"),
        ({"coordinator": "h:70000", "num_processes": 2, "process_id": 0}, "coordinator='h:70000' must be"),
        ({"coordinator": 3, "num_processes": 2, "process_id": 0}, "coordinator=3 must be HOST:PORT"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "process_id=2 is above 1: there are"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": -1}, "process_id=-1 is below 0"),
        ({"coordinator": "h:1", "num_processes": 0, "process_id": 0}, "num_processes=0 is below 1"),
        ({"coordinator": "h:1", "num_processes": 2.5, "process_id": 0}, "num_processes=2.5 must be a whole number"),
        ({"join_timeout": 0}, "join_timeout=0 must lie in (0, 1e6], in seconds"),
        ({"join_timeout": float("nan")}, "join_timeout=nan must lie in"),
    ],
)
def test_options(given, line):
    with pytest.raises(UserError) as stop:
        Hosts(**given)
    assert line in str(stop.value)


SLURM = {"JOB_ID": "5", "STEP_NODELIST": "node[3-4]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}


def test_slurm_is_found_out(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    where, count, rank, local_ids = hosts.surroundings(1)
    assert (where.partition(":")[0], count, rank, local_ids) == ("node3", 2, 1, [0])
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert hosts.surroundings(1) is None, "a job of one process is none"


def test_nothing_is_found_out():
    assert hosts.surroundings(1) is None
    assert not hosts.join(Hosts())
    with pytest.raises(UserError, match="the environment names no other processes: give coordinator"):
        join_hosts()


def test_one_process_is_alone():
    join_hosts("nowhere:1", 1, 0)
    assert hosts.peers() is None


def test_jax_was_told_and_jaxspec_was_not(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(UserError, match=r"for 4 processes: call jaxspec.join_hosts\(\) instead"):
        hosts.peers()


def test_one_model_a_job():
    only = Peers(1, {})
    only.take()
    with pytest.raises(UserError, match="these processes run a model already"):
        only.take()


def on(process, count):
    return [SimpleNamespace(process_index=process, id=(process, i)) for i in range(count)]


def test_devices_of_each_process():
    """As many of each, and a draft's parts within one where they fit."""
    both = [*on(0, 4), *on(1, 4)]
    assert [d.id for d in shared(both, 4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for size, line in ((3, "use one of 2, 4, 6, 8"), (1, "cannot be shared evenly by 2 processes with 4 devices")):
        with pytest.raises(UserError, match=line):
            shared(both, size)
    with pytest.raises(UserError, match="use one of 2, 4"):
        shared([*on(0, 4), *on(1, 2)], 6)


def test_a_drafts_parts_lie_side_by_side():
    grid = make_placement(8, draft_size=2).mesh.devices
    assert grid.shape == (2, 4)
    assert [[d.id for d in part] for part in grid.T] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_every_plan_survives_the_way():
    """All programs of an engine, with what their rows may ask for; and what it says is no more than numbers."""
    engine = lively_models.new_engine("first_layer", 3, warm_up=True)
    every = [plan for _, plan in plans(engine)]
    assert {plan.program for plan in every} == {"launch", "prefill", "catch_up", "copy_pages", "write_grammar"}
    for plan in every:
        packed = pack(plan.arrays)
        found = wire.from_bytes(wire.to_bytes(plan, packed))
        assert (found.program, found.k, found.variant) == (plan.program, plan.k, plan.variant)
        again = found.arrays
        assert (again.structure, again.leaves) == (packed.structure, packed.leaves)
        np.testing.assert_array_equal(again.words, packed.words)


def test_what_is_no_plan():
    said = wire.to_bytes(Plan("launch"), pack((np.zeros(3, np.int32),)))
    for cut in (0, 3, 5, 20):
        with pytest.raises((ValueError, KeyError, TypeError)):
            wire.from_bytes(said[:cut])
    for changed in (said.replace(b"Variant", b"Variabt"), said.replace(b"rules", b"rulez")):
        with pytest.raises((KeyError, TypeError)):
            wire.from_bytes(changed)

    @dataclasses.dataclass
    class Unknown:
        x: int = 0

    with pytest.raises(TypeError, match="Unknown cannot be sent to other processes: list it in CLASSES"):
        wire.as_json(Unknown())


def test_the_first_word_counts(monkeypatch):
    """Who ends a process does so once, whatever else goes wrong meanwhile."""
    said, status = [], []
    monkeypatch.setattr(peers, "write_line", lambda line, **_: said.append(line))
    monkeypatch.setattr(peers.os, "_exit", status.append)
    monkeypatch.setattr(peers.signal, "signal", lambda *_: None)  # which would leave interrupts ignored
    only, number = Peers(1, {}), itertools.count()
    only.end("one", 3)
    waiting = threading.Thread(target=lambda: only.end(f"two {next(number)}", 4), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert (said, status) == (["jaxspec: one: all processes end"], [3])


def test_another_version_is_named(monkeypatch):
    here = hosts.versions()
    assert set(here) == {"jaxspec", "jax", "jaxlib"}
    assert difference(here, hosts.versions(), 1) is None
    monkeypatch.setattr(hosts, "VERSION", "0.0.1")
    assert "jaxspec=0.0.1" in (difference(here, hosts.versions(), 1) or "")

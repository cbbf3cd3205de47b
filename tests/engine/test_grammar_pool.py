"""The pool of grammars' tables: who shares, who is evicted, who waits, and what is refused. Without a device."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.engine.grammar_pool import GrammarPool, end_ids
from jaxspec.grammars.automaton import Automaton
from jaxspec.sampling.processors.grammar import BLOCK, BLOCKS_PER_MIB, MAX_STATES, num_blocks
from tests.engine.schedules import request, scheduler
from tests.support import grammars

V = 5


def automaton(name: str, num_blocks: int = 1, size: int = V) -> Automaton:
    """Its table fills so many blocks."""
    states = (num_blocks * BLOCK - size) // 16
    return Automaton(np.zeros(size, np.uint16), np.broadcast_to(np.int32(0), (states, 16)), name)


def pool(mib: int = 1) -> GrammarPool:
    return GrammarPool(mib, V)


def test_equal_grammars_share_a_table():
    p = pool()
    first, second = p.hold(automaton("a")), p.hold(automaton("b"))
    assert (first, second) == (0, BLOCK)
    assert p.hold(automaton("a")) == first, "of another object, too"
    assert [(a.digest, at) for a, at in p.take_unwritten()] == [("a", 0), ("b", 1)]
    assert not p.take_unwritten()


def test_a_table_stays_until_another_needs_its_room():
    """The one that was used last goes last, and none that is used."""
    p = pool()
    assert BLOCKS_PER_MIB == 4
    tables = {name: automaton(name) for name in "abcdef"}
    places = {name: p.hold(tables[name]) for name in "abcd"}
    for name in "bcd":
        p.release(tables[name])
    p.take_unwritten()
    assert p.hold(tables["b"]) == places["b"]
    p.release(tables["b"])
    assert not p.take_unwritten(), "it is still there"
    assert p.hold(tables["e"]) == places["c"]
    assert p.hold(tables["f"]) == places["d"]
    assert [a.digest for a, _ in p.take_unwritten()] == ["e", "f"]
    assert set(p.resident) == {"a", "b", "e", "f"}


def test_a_table_in_use_by_another_stays():
    p = pool()
    table = automaton("a", 4)
    assert p.hold(table) == p.hold(table) == 0
    p.release(table)
    assert p.hold(automaton("b")) is None
    p.release(table)
    assert p.hold(automaton("b")) == 0


def test_a_table_needs_blocks_in_a_row():
    p = pool()
    tables = {name: automaton(name, size) for name, size in {"a": 1, "b": 1, "c": 1, "two": 2, "four": 4}.items()}
    for name in "abc":
        p.hold(tables[name])
    p.release(tables["a"])
    p.release(tables["c"])
    assert p.hold(tables["two"]) == 2 * BLOCK, "behind b, where c was"
    assert p.hold(tables["four"]) is None
    p.release(tables["two"])
    p.release(tables["b"])
    assert p.hold(tables["four"]) == 0
    assert set(p.resident) == {"four"}


@pytest.mark.parametrize(
    ("mib", "given", "said"),
    [
        (0, automaton("a"), "grammar_pool_mib=0 turns grammars off: raise it"),
        (
            1,
            automaton("a", 5),
            "the grammar's table takes 1.2 MiB, the pool of all grammars has 1: simplify the grammar",
        ),
        (
            1,
            automaton("a", size=V + 1),
            "the grammar is built for 6 token ids, the model has 5: build it for this model",
        ),
        (
            64,
            Automaton(np.zeros(V, np.uint16), np.broadcast_to(np.int32(0), (MAX_STATES + 1, 1)), "a"),
            "the grammar has 65536 states, at most 65535 fit: simplify it",
        ),
    ],
)
def test_what_never_fits_is_refused(mib, given, said):
    with pytest.raises(UserError) as refused:
        pool(mib).check(given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_fits_is_not_refused():
    for automaton_of in (automaton("a", 4), grammars.random(V, 9, 0)):
        pool().check(automaton_of)
    pool().check(None)
    assert num_blocks(automaton("a", 4)) == 4


def test_end_ids():
    assert end_ids(grammars.random(9, 4, 3, ends=(2, 7))) == (2, 7)


def admitted(s) -> list[int]:
    return [r.id for r in s.admit()[0]]


def asking(id: int, table: Automaton | None):
    found = request(id=id, first=100 * id)
    found.automaton = table
    return found


def test_a_request_waits_for_room_for_its_table():
    """A later request with a grammar waits behind it, others do not. It holds no pages meanwhile."""
    s = scheduler(num_pages=64, grammars=pool())
    large, other = automaton("large", 3), automaton("other", 2)
    requests = [asking(0, large), asking(1, large), asking(2, other), asking(3, None), asking(4, large)]
    for r in requests:
        s.add(r)
    assert admitted(s) == [0, 1, 3]
    assert [r.grammar_at for r in requests] == [0, 0, None, None, None]
    free = s.allocator.num_free
    s.remove(requests[0])
    assert admitted(s) == []
    assert s.allocator.num_free == free + len(requests[1].pages)
    s.remove(requests[1])
    assert admitted(s) == [2]
    assert requests[2].grammar_at == 0
    s.remove(requests[2])
    assert admitted(s) == [4]


def test_who_is_preempted_lets_its_table_go():
    s = scheduler(num_pages=64, grammars=pool())
    first = asking(0, automaton("a", 4))
    s.add(first)
    assert admitted(s) == [0]
    s.preempt(first)
    assert first.grammar_at is None
    assert not s.grammars.resident["a"].users
    assert admitted(s) == [0]
    s.reset([first])
    assert (first.grammar_at, s.grammars.resident, s.grammars.unwritten) == (None, {}, [])

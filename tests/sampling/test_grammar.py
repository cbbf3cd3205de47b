"""The mask of a grammar against the automaton on the host: after every number of drafts, legal or not."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import processors
from jaxspec.sampling.processors import grammar
from tests.support import grammars
from tests.support.sizes import cases

V, K = 37, 4
ENDS = (2, 30)
AUTOMATA = [
    grammars.random(V, 9, 1, ENDS),
    grammars.random(V, 3, 2, ENDS, legal=0.05),
    grammars.anything(V, ENDS),
    # More than a block of words, in as many states as there may be, so that some states do not fit int16.
    grammars.of_states(V, [{(i + 1) % V: i + 1} for i in range(grammar.MAX_STATES - 1)], ENDS),
]


def pool_of(automata) -> tuple[jax.Array, list[int]]:
    """The device's words, and where each table begins; one block between them is no table's."""
    sizes = [grammar.num_blocks(a) + 1 for a in automata]
    pool = jnp.full((sum(sizes) * grammar.BLOCK,), 12345, jnp.uint16)
    first = np.cumsum([0, *sizes])[:-1]
    write = jax.jit(grammar.write_grammar)
    for automaton, at in zip(automata, first, strict=True):
        for i, block in enumerate(grammar.blocks(automaton)):
            pool, _ = write(None, None, pool, block, np.int32(at + i))
    return pool, [int(at) * grammar.BLOCK for at in first]


POOL, PLACES = pool_of(AUTOMATA)


def request(which: int | None, state: int = 0):
    if which is None:
        return SimpleNamespace(automaton=None, grammar_at=None, grammar_state=0)
    return SimpleNamespace(automaton=AUTOMATA[which], grammar_at=PLACES[which], grammar_state=state)


def made(requests, rows: int):
    """-> (the processors, their tables, their states at the start)"""
    found = jax.tree.map(jnp.asarray, processors.of_requests(("grammar",), requests, rows, None, V))
    text = processors.Text(None, jnp.zeros(rows, jnp.int32), None, None, V)
    return found, processors.tables(found, text, POOL), processors.init(found, text), text


@jax.jit
def masked(found, tables, states, num_tokens, logits, drafts, i):
    text = processors.Text(None, num_tokens, None, None, V)
    return processors.adjuster(found, tables, states, text)(logits, drafts, i)


def walks(rng, automaton, start: int) -> list[int]:
    """Drafts from a state: legal ones mostly, so that they lead somewhere."""
    drafts, state = [], start
    for _ in range(K):
        legal = np.flatnonzero(automaton.legal(state)) if state >= 0 else []
        drafts.append(int(rng.choice(legal) if len(legal) and rng.random() < 0.8 else rng.integers(V)))
        state = automaton.advance(state, drafts[-1:])
    return drafts


def cases_of(seed: int):
    """Rows of every automaton and of none: (requests, drafts)."""
    rng = np.random.default_rng(seed)
    requests, drafts = [], []
    for which in (*range(len(AUTOMATA)), None, 0, 3, 3):
        state = 0 if which is None else int(rng.integers(len(AUTOMATA[which].next)))
        requests.append(request(which, state))
        drafts.append(walks(rng, AUTOMATA[which or 0], state))
    return requests, np.array(drafts, np.int32)


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_automaton(seed):
    """A draft that is not legal frees what follows it: the target rejects it, so nothing that follows counts."""
    requests, drafts = cases_of(seed)
    rows = len(requests) + 1  # one is padding
    drafts = np.concatenate([drafts, drafts[:1]])
    found, tables, states, _ = made(requests, rows)
    logits = np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32)
    for i in range(K + 1):
        got = np.asarray(masked(found, tables, states, jnp.zeros(rows, jnp.int32), logits, drafts, i))
        for row, r in enumerate(requests):
            now = -1 if r.automaton is None else r.automaton.advance(r.grammar_state, drafts[row, :i].tolist())
            legal = np.ones(V, bool) if now < 0 else r.automaton.legal(now)
            np.testing.assert_array_equal(got[row], np.where(legal, logits[row], -np.inf))
        np.testing.assert_array_equal(got[-1], logits[-1])


def test_each_row_may_be_at_a_place_of_its_own():
    """Places may differ, as on the paths of a tree, where a node's depth is its number of drafts."""
    requests, drafts = cases_of(11)
    rows = len(requests)
    found, tables, states, _ = made(requests, rows)
    depth = np.arange(rows, dtype=np.int32) % (K + 1)
    logits = np.zeros((rows, V), np.float32)
    arguments = found, tables, states, jnp.zeros(rows, jnp.int32), logits, drafts
    each = np.stack([masked(*arguments, i) for i in range(K + 1)])
    np.testing.assert_array_equal(masked(*arguments, depth), each[depth, np.arange(rows)])


def test_the_form_without_lookups_gives_the_same():
    """The mask of TPUs is computed in several steps."""
    many = grammars.of_table(np.random.default_rng(0).integers(-1, 9, (9, 700)))
    assert many.next.shape[1] > 2 * grammar.STEP
    pool, (at,) = pool_of([many])
    width, classes = jnp.array([many.next.shape[1]] * 9 + [0]), jnp.stack([jnp.asarray(many.classes)] * 10)
    tables = grammar.Tables(pool, classes, jnp.full(10, at + 700))
    state = jnp.array([*range(9), 0])
    arguments = tables, grammar.row_of(tables, width, state), width
    legal = grammar.legal_by_index(*arguments)
    np.testing.assert_array_equal(legal[:9], [many.legal(i) for i in range(9)])
    np.testing.assert_array_equal(jax.jit(grammar.legal_by_bits)(*arguments)[:9], legal[:9])


@pytest.mark.parametrize("seed", range(3))
def test_advances_as_the_automaton(seed):
    """By the tokens that a round commits, of which there are fewer or none in some rows."""
    requests, drafts = cases_of(seed)
    found, tables, states, _ = made(requests, len(requests))
    kept = np.where(np.arange(K) < -np.arange(len(requests))[:, None] % (K + 1), drafts, -1)
    after = processors.advance(found, tables, states, jnp.asarray(kept))["grammar"]
    for row, r in enumerate(requests):
        if r.automaton is None:
            assert after[row] == grammar.FREE
        else:
            tokens = [t for t in kept[row].tolist() if t >= 0]
            assert after[row] == r.automaton.advance(r.grammar_state, tokens), (row, tokens)


def test_a_row_that_is_free_stays_free():
    found, tables, _, _ = made([request(0), request(3)], 2)
    states = {"grammar": jnp.full(2, grammar.FREE)}
    tokens = jnp.array([[1, 2, 3]] * 2, jnp.int32)
    assert processors.advance(found, tables, states, tokens)["grammar"].tolist() == [grammar.FREE] * 2


@cases("which", range(len(AUTOMATA)), quick=[0, 3])
def test_a_table_takes_whole_blocks(which):
    automaton = AUTOMATA[which]
    table = grammar.blocks(automaton)
    assert table.shape == (grammar.num_blocks(automaton), grammar.BLOCK // 2)
    words = table.view(np.uint16).reshape(-1)
    np.testing.assert_array_equal(words[:V], automaton.classes)
    np.testing.assert_array_equal(words[V : V + automaton.next.size], automaton.next.reshape(-1).astype(np.uint16))

"""Automata of grammars made by hand, and at random."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from jaxspec.grammars.automaton import FORBIDDEN, Automaton


def of_table(table: np.ndarray) -> Automaton:
    """table [S, V]: next state of each state and token id, -1 where it is not legal; the last state is the end."""
    columns, classes = np.unique(np.asarray(table, np.int32), axis=1, return_inverse=True)
    digest = hashlib.sha256(f"{table.shape}".encode() + table.astype(np.int32).tobytes()).hexdigest()
    return Automaton(classes.reshape(-1).astype(np.uint16), columns, digest)


def of_states(size: int, states: Sequence[Mapping[int, int]], ends: Sequence[int]) -> Automaton:
    """states: id -> next state, of each state but the end, which is the last one."""
    table = np.full((len(states) + 1, size), FORBIDDEN)
    for row, state in zip(table, states, strict=False):
        row[list(state)] = list(state.values())
    table[-1, list(ends)] = len(states)
    return of_table(table)


def anything(size: int, ends: Sequence[int]) -> Automaton:
    """Every text, which may end anywhere."""
    return of_states(size, [{i: int(i in ends) for i in range(size)}], ends)


def random(size: int, states: int, seed: int, ends: Sequence[int] = (0,), legal: float = 0.3) -> Automaton:
    """Of each state a share of all ids is legal, and at least one; a text may end in every third state or so."""
    rng = np.random.default_rng(seed)
    table = np.where(rng.random((states + 1, size)) < legal, rng.integers(states, size=(states + 1, size)), FORBIDDEN)
    some = rng.choice([i for i in range(size) if i not in ends], states + 1)
    table[np.arange(states + 1), some] = rng.integers(states, size=states + 1)
    table[:, list(ends)] = np.where(rng.random(states + 1) < legal, states, FORBIDDEN)[:, None]
    table[-1] = FORBIDDEN
    table[-1, list(ends)] = states
    return of_table(table)


def obeys(automaton: Automaton, output: Sequence[int]) -> bool:
    return automaton.advance(0, output) != FORBIDDEN

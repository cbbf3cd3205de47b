"""Texts of a grammar: whether one is in it, and some that are, taken at random through its automaton."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxspec.api.grammars import grammar_vocabulary
from jaxspec.grammars import machine
from jaxspec.grammars.automaton import Automaton
from jaxspec.grammars.nodes import Node
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.grammars.vocabulary import Vocabulary
from tests.support.vocabularies import ids_of, tokenizer_of


@functools.cache
def tokens(kind: str = "byte-level") -> Vocabulary:
    """Every byte, and some words and pieces of characters."""
    tokenizer = tokenizer_of(kind)
    return grammar_vocabulary(tokenizer, ids_of(kind, "<|end|>"), len(tokenizer) + 3)


def form(**given: Any) -> StructuredOutputs:
    found = StructuredOutputs.of(given)
    assert found is not None
    return found


class Language:
    """The texts of a node."""

    def __init__(self, node: Node) -> None:
        self.table, self.accepting = machine.compiled(node)

    def __contains__(self, text: str) -> bool:
        state = 0
        for byte in text.encode():
            state = int(self.table[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


def distances(automaton: Automaton) -> list[int]:
    """How many tokens each state needs to its end."""
    found = [0 if state == automaton.end else 10**9 for state in range(len(automaton.next))]
    after = [np.unique(row[row >= 0]).tolist() for row in automaton.next]
    changed = True
    while changed:
        changed = False
        for state, targets in enumerate(after):
            if state == automaton.end:
                continue
            steps = 1 + min((found[target] for target in targets), default=10**9)
            if steps < found[state]:
                found[state], changed = steps, True
    return found


def walk(automaton: Automaton, random: np.random.Generator, most: int, far: list[int]) -> list[int]:
    """The ids of one text: at random, and the shortest way to an end after `most` tokens."""
    state, ids = 0, list[int]()
    while state != automaton.end:
        legal = np.flatnonzero(automaton.legal(state))
        targets = automaton.next[state][automaton.classes[legal]]
        if len(ids) >= most:
            nearest = min(far[target] for target in targets)
            legal = legal[[far[target] == nearest for target in targets]]
            targets = automaton.next[state][automaton.classes[legal]]
        # States first, then tokens: nearly all tokens go on with a string, and few end it.
        target = random.choice(np.unique(targets))
        ids.append(int(random.choice(legal[targets == target])))
        state = int(target)
    return ids


def texts(automaton: Automaton, vocabulary: Vocabulary, count: int, most: int = 30) -> list[str]:
    random, far = np.random.default_rng(0), distances(automaton)
    found = []
    for _ in range(count):
        ids = walk(automaton, random, int(random.integers(most)), far)
        assert automaton.advance(0, ids) == automaton.end
        assert ids[-1] in vocabulary.end_ids
        found.append(b"".join(vocabulary.tokens[i] or b"" for i in ids[:-1]).decode())
    return found

"""The automaton of a grammar: for each state, the legal token ids and the state that each of them leads to."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

START = 0  # start state of every automaton
FORBIDDEN = -1  # entry of a table for a token that is not legal, and state after such a token


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A finite automaton over token ids. Ids that no state tells apart share a class, so that its table is small.

    The last state, `end`, is reached by end tokens, which are legal only where the grammar may end. In `end` only end
    tokens are legal, and they lead to `end`. Every state has a legal token, and `end` can be reached from it.

    classes: u16[V], class of each token id of the model's vocabulary.
    next: i32[S, C], next state of each state and class; FORBIDDEN where the class is not legal.
    digest: digest of all that made the automaton: the grammar, the tokenizer and the end ids.
    """

    classes: np.ndarray[Any, np.dtype[np.uint16]]
    next: np.ndarray[Any, np.dtype[np.int32]]
    digest: str

    @property
    def end(self) -> int:
        """Return the state after an end token."""
        return len(self.next) - 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of both arrays."""
        return self.classes.nbytes + self.next.nbytes

    def advance(self, state: int, tokens: Sequence[int]) -> int:
        """Return the state after these tokens, which is FORBIDDEN once a token was not legal."""
        for token in tokens:
            if state == FORBIDDEN or not 0 <= token < len(self.classes):
                return FORBIDDEN
            state = int(self.next[state, self.classes[token]])
        return state

    def legal(self, state: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return bool[V]: whether each token id is legal in a state."""
        allowed: np.ndarray[Any, np.dtype[np.bool_]] = self.next[state][self.classes] != FORBIDDEN
        return allowed

    @functools.cached_property
    def class_sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """i64[C]: number of token ids of each class."""
        sizes: np.ndarray[Any, np.dtype[np.int64]] = np.bincount(self.classes, minlength=self.next.shape[1])
        return sizes

    def num_legal(self, state: int) -> int:
        """Return the number of token ids that are legal in a state."""
        return 0 if state == FORBIDDEN else int(self.class_sizes[self.next[state] != FORBIDDEN].sum())

    def legal_counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return i64[S]: the number of legal token ids of each state."""
        counts: np.ndarray[Any, np.dtype[np.int64]] = (self.next != FORBIDDEN) @ self.class_sizes
        return counts


def with_reasoning(automaton: Automaton, mark_id: int) -> Automaton:
    """Return an automaton whose grammar begins after a mark, such as the token </think>.

    It has one more state, its start state, in which all tokens except end tokens are legal, so that no output ends
    before the grammar. The mark leads to the grammar's own start state.

    mark_id: token id of the mark.
    """
    ends = automaton.next[automaton.end] != FORBIDDEN  # bool[C]
    return with_start(automaton, np.where(ends, FORBIDDEN, START), mark_id, START + 1, "after")


def with_optional_reasoning(automaton: Automaton, opening_id: int, mark_id: int) -> Automaton:
    """Return an automaton whose grammar begins at once, or after reasoning if the output begins with `opening_id`.

    opening_id, mark_id: token ids of the marks that open and close reasoning.
    """
    found = with_reasoning(automaton, mark_id)
    first = found.next[START + 1]  # the grammar's own start state
    return with_start(found, np.where(first == FORBIDDEN, FORBIDDEN, first + 1), opening_id, START + 1, "or opened by")


def with_start(automaton: Automaton, row: np.ndarray[Any, Any], mark_id: int, target: int, name: str) -> Automaton:
    """Return an automaton with one more state, its new start state. The old states' numbers are 1 higher.

    row: i[C], next state of the new start state for each class, in the new numbers.
    mark_id: token id that leads from the new start state to `target`, and behaves as before in the old states.
    name: what distinguishes the digest.
    """
    mark = automaton.next.shape[1]  # new class
    shifted = np.where(automaton.next == FORBIDDEN, FORBIDDEN, automaton.next + 1)
    shifted = np.concatenate([shifted, shifted[:, automaton.classes[mark_id], None]], axis=1)
    classes = automaton.classes.copy()
    classes[mark_id] = mark
    digest = hashlib.sha256(f"{automaton.digest} {name} {mark_id}".encode()).hexdigest()
    return Automaton(classes, np.concatenate([np.append(row, target)[None], shifted]).astype(np.int32), digest)

"""The automaton of a grammar over a vocabulary's tokens, from the automaton over bytes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxspec.common import notations
from jaxspec.common.errors import UserError, quoted, shortened
from jaxspec.grammars import machine
from jaxspec.grammars.automaton import FORBIDDEN, Automaton, with_optional_reasoning, with_reasoning
from jaxspec.grammars.machine import Flags, Table
from jaxspec.grammars.nodes import choice, concat, literal, too_large
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.grammars.vocabulary import Vocabulary

MAX_CLASSES = 65_535  # largest number of classes of token ids, which are of type u16
MAX_ENTRIES = 16 << 20  # largest number of entries of the table
AT_ONCE = 4 << 20  # number of entries that are computed at once


def automaton(grammar: StructuredOutputs, vocabulary: Vocabulary) -> Automaton:
    """Return the automaton of a grammar over token ids. This may take a second, and any thread may call it.

    Raises: UserError for a grammar without any text, or one that exceeds a limit.
    """
    mark = None if grammar.after is None else vocabulary.marks.get(grammar.after)
    if grammar.after is not None and (mark is None or mark in vocabulary.end_ids):
        some = ", ".join(repr(text) for text, i in vocabulary.marks.items() if i not in vocabulary.end_ids)
        raise UserError(
            f"structured_outputs: after={quoted(grammar.after)} is not a token of this tokenizer after which an output "
            f"goes on: name one, such as {shortened(some, 80)}"
        )
    vocabulary = vocabulary.spelling(grammar.spelled)
    node = grammar.node()
    if vocabulary.strips and (mark is None or grammar.opening):  # removes one space at the output's start
        space = literal(" ")  # JSON never begins with another
        node = choice(concat(space, node), node) if grammar.is_json else concat(space, node)
    try:
        table, accepting = machine.compiled(node)
    except RecursionError:
        raise UserError("structured_outputs: the grammar is nested too deeply: flatten it") from None
    of_token, rows = behaviours(table, vocabulary)
    found = over_tokens(of_token, rows, accepting, vocabulary, digest(grammar, vocabulary))
    if mark is None:
        return found
    opening = None if grammar.opening is None else vocabulary.marks.get(grammar.opening)
    return with_reasoning(found, mark) if opening is None else with_optional_reasoning(found, opening, mark)


def behaviours(table: Table, vocabulary: Vocabulary) -> tuple[np.ndarray, Table]:
    """Return (index i64[T] of each text token, rows i32[R, S]): the state after a token from each state.

    Tokens are read byte by byte, all at once. Few beginnings of tokens differ in what they do to the states, so that
    each step computes a row for each that does, and not for each token.
    """
    _, starts, lengths, data = vocabulary.text_tokens
    states = len(table)
    columns, class_of_byte = np.unique(table, axis=1, return_inverse=True)
    class_of_byte = class_of_byte.reshape(-1)
    width = columns.shape[1]
    after = np.concatenate([np.where(columns < 0, states, columns), np.full((1, width), states)])  # last: dead state
    after = np.ascontiguousarray(after, np.int32)
    known: dict[bytes, int] = {}
    rows: list[Table] = []

    def index(row: Table) -> int:
        """Return the index of a row among the rows found so far."""
        i = known.setdefault(row.tobytes(), len(rows))
        if i == len(rows):
            if (len(rows) + 1) * states > MAX_ENTRIES:
                raise too_large("entries in its table", MAX_ENTRIES)
            rows.append(row)
        return i

    dead = index(np.full(states, states, np.int32))
    current = np.full(len(lengths), index(np.arange(states, dtype=np.int32)))
    active = np.arange(len(lengths))
    position = 0
    while len(active):
        pairs = current[active] * width + class_of_byte[data[starts[active] + position]]
        distinct, inverse = np.unique(pairs, return_inverse=True)
        size = max(AT_ONCE // states, 1)
        found: list[int] = []
        for at in range(0, len(distinct), size):
            row, byte = np.divmod(distinct[at : at + size], width)
            found += map(index, after[np.stack([rows[i] for i in row.tolist()]), byte[:, None]])
        current[active] = np.array(found)[inverse]
        position += 1
        active = active[(lengths[active] > position) & (current[active] != dead)]
    return current, np.stack(rows)


def over_tokens(of_token: np.ndarray, rows: Table, accepting: Flags, vocabulary: Vocabulary, name: str) -> Automaton:
    """Return the automaton of the rows that `behaviours` gives, with an end state. name: digest of the automaton."""
    states = len(accepting)
    used, class_of_token = np.unique(of_token, return_inverse=True)
    table = rows[used].T
    table = np.where(table == states, FORBIDDEN, table)
    # The last row is the end state; the last two columns are tokens that are forbidden and tokens that end an output.
    ends = np.where(accepting, states, FORBIDDEN)
    table = np.concatenate([table, np.full((states, 1), FORBIDDEN), ends[:, None]], axis=1)
    last = np.append(np.full(table.shape[1] - 1, FORBIDDEN), states)
    table = np.concatenate([table, last[None]]).astype(np.int32)
    classes = np.full(vocabulary.size, table.shape[1] - 2, np.int64)
    classes[vocabulary.text_tokens[0]] = class_of_token
    classes[[i for i in vocabulary.end_ids if i < vocabulary.size]] = table.shape[1] - 1
    table = trimmed(table)
    columns, inverse = np.unique(table, axis=1, return_inverse=True)
    if columns.shape[1] > MAX_CLASSES:
        raise too_large("classes of token ids", MAX_CLASSES)
    return Automaton(inverse.reshape(-1)[classes].astype(np.uint16), np.ascontiguousarray(columns), name)


def trimmed(table: Table) -> Table:
    """Return the table without the states that the start does not reach, and those that do not reach the end.

    A vocabulary may lack tokens for some bytes, so that a state of the automaton over bytes may be a dead end.
    """
    end = len(table) - 1
    after = [np.unique(row[row >= 0]).tolist() for row in table]
    before: list[list[int]] = [[] for _ in table]
    for state, targets in enumerate(after):
        for target in targets:
            before[target].append(state)
    kept = sorted({*reached(after, 0)} & {*reached(before, end)})
    if 0 not in kept:
        raise UserError("structured_outputs: no text of the tokenizer's tokens fits the grammar: relax it")
    new = np.full(len(table) + 1, FORBIDDEN, np.int32)  # last entry: FORBIDDEN, which is -1
    new[kept] = np.arange(len(kept))
    return new[table[kept]]


def reached(edges: list[list[int]], start: int) -> Iterator[int]:
    """Yield the states that edges lead to from a state, and this state."""
    seen, left = {start}, [start]
    while left:
        yield (state := left.pop())
        fresh = [target for target in edges[state] if target not in seen]
        seen.update(fresh)
        left += fresh


def digest(grammar: StructuredOutputs, vocabulary: Vocabulary) -> str:
    """Return a digest of all that an automaton depends on: the form, the vocabulary and the code that makes it."""
    named = (grammar.after, grammar.opening, *grammar.spelled)
    marks = [vocabulary.marks.get(text) for text in named if text is not None]
    text = repr((dataclasses.astuple(grammar), marks, vocabulary.digest, sources()))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@functools.cache
def sources() -> str:
    """Return a digest of the Python files of this package, and of the notations that it shares."""
    found = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(notations.__file__)):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()

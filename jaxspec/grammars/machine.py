"""The smallest deterministic automaton over the bytes of a node's texts in UTF-8.

The automaton is made here, and not by a library, because its size is limited while it grows: a short expression such as
.*a.{30} would fill any memory.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from jaxspec.grammars.nodes import NOTHING, Chars, Choice, Concat, Listing, Node, Ranges, Repeat, too_large

MAX_PARTS = 200_000  # largest number of states of the automaton that is not deterministic yet
MAX_STATES = 16_384  # largest number of states of the deterministic automaton
MAX_WORK = 3_000_000  # largest number of edges and moves that are read while the automaton is made deterministic
LENGTHS = (0x80, 0x800, 0x10000, 0x110000)  # code points from which UTF-8 takes one byte more
DEAD = -1
MASK = (1 << 64) - 1  # keys are sums modulo 2 ** 64
Table = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def compiled(node: Node) -> tuple[Table, Flags]:
    """Return (table i32[S, 256], accepting bool[S]) of the automaton of a node's texts. State 0 is the start.

    table: next state of each state and byte; DEAD where no text goes on with the byte.

    Raises: UserError for a node that exceeds a limit.
    """
    parts = Parts()
    whole = parts.add(node, parts.new())
    end = parts.new()  # a state of its own, without edges and moves
    parts.moves[whole].append(end)
    return smallest(*parts.deterministic(end))


class Parts:
    """An automaton that is not deterministic: each state has edges (first byte, last byte, target) and free moves."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.moves: list[list[int]] = []
        self.reached: dict[int, frozenset[int]] = {}
        self.work = 0  # number of edges and moves that were read

    def new(self) -> int:
        """Return a new state."""
        if len(self.edges) >= MAX_PARTS:
            raise too_large("parts", MAX_PARTS)
        self.edges.append([])
        self.moves.append([])
        return len(self.edges) - 1

    def add(self, node: Node, at: int) -> int:
        """Add the texts of a node after the state `at`, and return the state after them. No edge leads to `at`."""
        match node:
            case Chars(ranges):
                return self.add_chars(ranges, at)
            case Concat(items):
                for item in items:
                    at = self.add(item, at)
                return at
            case Choice(options):
                end = self.new()
                for option in options:
                    self.moves[self.add(option, at)].append(end)
                return end
            case Repeat(item, least, most):
                for _ in range(least):
                    at = self.add(item, at)
                if most is None:
                    loop = self.new()
                    self.moves[at].append(loop)
                    self.moves[self.add(item, loop)].append(loop)
                    return loop
                end = self.new()
                self.moves[at].append(end)
                for _ in range(most - least):
                    at = self.add(item, at)
                    self.moves[at].append(end)
                return end
            case Listing():
                return self.add_listing(node, at)

    def add_listing(self, node: Listing, at: int) -> int:
        """Add a listing. Between the members a state waits for a member, or a member has just been read."""
        end, waits = self.new(), self.new()
        self.moves[at].append(waits)
        if not any(node.required):
            self.moves[at].append(end)
        last = max((i for i, required in enumerate(node.required) if required), default=-1)
        for i, (member, required) in enumerate(zip(node.members, node.required, strict=True)):
            read, following = self.add(member, waits), self.new()
            if i < len(node.members) - 1 or node.more != NOTHING:
                self.moves[self.add(node.separator, read)].append(following)
            if i >= last:
                self.moves[read].append(end)
            if not required:
                self.moves[waits].append(following)
            waits = following
        read = self.add(node.more, waits)
        self.moves[read].append(end)
        self.moves[self.add(node.separator, read)].append(waits)
        return end

    def add_chars(self, ranges: Ranges, at: int) -> int:
        """Add a character. Characters whose last bytes are alike share the states before those."""
        end = self.new()
        before: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in ranges:
            for sequence in sequences(low, high):
                for start in range(len(sequence) - 1, 0, -1):
                    if sequence[start:] not in before:
                        before[sequence[start:]] = state = self.new()
                        self.edges[state].append((*sequence[start], before[sequence[start + 1 :]]))
                self.edges[at].append((*sequence[0], before[sequence[1:]]))
        return end

    def count(self, work: int) -> None:
        """Count edges and moves that were read. Raise UserError if they are too many."""
        self.work += work
        if self.work > MAX_WORK:
            raise too_large("steps to its automaton", MAX_WORK)

    def closure(self, state: int) -> frozenset[int]:
        """Return the states with edges, or without moves, that free moves reach from this one."""
        if state not in self.reached:
            seen, left = {state}, [state]
            while left:
                for target in self.moves[left.pop()]:
                    if target not in seen:
                        seen.add(target)
                        left.append(target)
            self.count(len(seen))
            self.reached[state] = frozenset(s for s in seen if self.edges[s] or not self.moves[s])
        return self.reached[state]

    def deterministic(self, end: int) -> tuple[Table, Flags]:
        """Return (table, accepting) as `compiled` does, not the smallest yet. end: state after a whole text."""
        start = self.closure(0)
        found = {start: 0}
        left = [start]
        rows: list[Table] = []
        for states in left:  # grows in the loop
            row = np.full(256, DEAD, np.int32)
            spans = [edge for state in states for edge in self.edges[state]]
            cuts = sorted({c for low, high, _ in spans for c in (low, high + 1)})
            targets: list[set[int]] = [set() for _ in cuts]
            for low, high, target in spans:
                for i in range(bisect.bisect_left(cuts, low), bisect.bisect_left(cuts, high + 1)):
                    targets[i].add(target)
                    self.count(1)
            for i, reached in enumerate(targets):
                if reached:
                    after = frozenset[int]().union(*map(self.closure, reached))
                    self.count(len(after))
                    row[cuts[i] : cuts[i + 1]] = found.setdefault(after, len(found))
                    if len(found) > len(left):
                        left.append(after)
            rows.append(row)
            if len(found) > MAX_STATES:
                raise too_large("states", MAX_STATES)
        return np.stack(rows), np.array([end in states for states in left])


def sequences(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the UTF-8 of a range of characters as sequences of ranges of bytes."""
    for limit in LENGTHS:
        if low < limit <= high:
            return sequences(low, limit - 1) + sequences(limit, high)
    first, last = chr(low).encode(), chr(high).encode()
    for i in range(1, len(first)):  # a range whose last bytes are not all of 80..BF is split where its end changes
        size = 1 << 6 * i
        if low // size != high // size:
            if low % size:
                return sequences(low, low | (size - 1)) + sequences((low | (size - 1)) + 1, high)
            if high % size != size - 1:
                return sequences(low, high // size * size - 1) + sequences(high // size * size, high)
    return [tuple(zip(first, last, strict=True))]


def smallest(table: Table, accepting: Flags) -> tuple[Table, Flags]:
    """Return the automaton with states merged that no text tells apart. The start stays state 0."""
    _, firsts, inverse = np.unique(alike(table, accepting), return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(firsts))[inverse]  # states in the order in which they were found
    chosen = np.sort(firsts)
    after = np.append(labels, DEAD)[table].astype(np.int32)
    # The keys are sums of random numbers. States with the same key that differ would be wrong, and are left apart.
    if not (np.array_equal(after, after[chosen][labels]) and np.array_equal(accepting, accepting[chosen][labels])):
        return table, accepting
    return after[chosen], accepting[chosen]


def alike(table: Table, accepting: Flags) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return labels i64[S] of the states, equal for states that no text tells apart.

    A state's key is a random sum over the labels that its edges lead to. States with one label and two keys get two
    labels. The largest part keeps its label, as in Hopcroft's algorithm, and only the keys of states before the others
    change: the work is that of reading each edge log2(S) times, also for a long chain.
    """
    columns = np.unique(table, axis=1)
    states, width = columns.shape
    noise = np.random.default_rng(0)
    of_column, of_label = np.split(noise.integers(MASK, size=width + states + 2, dtype=np.uint64), [width])
    source, column = np.nonzero(columns != DEAD)
    pairs, inverse = np.unique(columns[source, column].astype(np.int64) * states + source, return_inverse=True)
    weights = np.zeros(len(pairs), np.uint64)  # of each pair of a state and the one before it
    np.add.at(weights, inverse, of_column[column])
    targets, sources = np.divmod(pairs, states)
    sums = np.zeros(states, np.uint64)
    np.add.at(sums, sources, weights * of_label[accepting.astype(np.int64)[targets]])
    before: list[list[tuple[int, int]]] = [[] for _ in range(states)]
    for target, state, weight in zip(targets.tolist(), sources.tolist(), weights.tolist(), strict=True):
        before[target].append((state, weight))

    keys: list[int] = sums.tolist()
    values: list[int] = of_label.tolist()
    labels: list[int] = accepting.astype(np.int64).tolist()
    members = [{*np.flatnonzero(~accepting).tolist()}, {*np.flatnonzero(accepting).tolist()}]
    changed = set(range(states))
    while changed:
        groups: dict[int, dict[int, set[int]]] = {}
        for state in changed:
            groups.setdefault(labels[state], {}).setdefault(keys[state], set()).add(state)
        changed = set()
        moved: list[tuple[set[int], int, int]] = []
        for label, by_key in groups.items():
            parts = sorted(by_key.values(), key=len)
            if len(members[label]) < 2 * sum(map(len, parts)):
                parts = sorted([*parts, members[label].difference(*parts)], key=len)
                members[label] = parts.pop()
            else:
                members[label].difference_update(*parts)
            for part in filter(None, parts):
                moved.append((part, label, len(members)))
                members.append(part)
        for part, old, new in moved:
            step = values[new] - values[old]
            for state in part:
                labels[state] = new
                for earlier, weight in before[state]:
                    keys[earlier] = (keys[earlier] + weight * step) & MASK
                    changed.add(earlier)
    return np.array(labels, np.int64)

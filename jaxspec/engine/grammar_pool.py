"""The pool of grammars' tables in device memory: which table is where, and how many running requests use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxspec.common.errors import UserError
from jaxspec.grammars.automaton import FORBIDDEN, Automaton
from jaxspec.runtime.plans import Plan
from jaxspec.sampling.processors.grammar import BLOCK, BLOCKS_PER_MIB, MAX_STATES, blocks, num_blocks

EMPTY = np.zeros(BLOCK // 2, np.int32)  # a block of zeros


@dataclasses.dataclass
class Resident:
    """A table in the pool: its first block, its number of blocks, and the number of running requests that use it."""

    first: int
    size: int
    users: int = 0


class GrammarPool:
    """A pool of blocks for the tables of automata. Requests with equal automata, by their digests, share a table.

    A table stays in the pool when no request uses it any more, until another one needs its blocks. The table that has
    been unused for the longest time goes first.

    mib: size of the pool in MiB.
    vocab_size: size V of the target's vocabulary.
    """

    def __init__(self, mib: int, vocab_size: int) -> None:
        self.num_blocks = mib * BLOCKS_PER_MIB
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Remove all tables."""
        self.resident: dict[str, Resident] = {}  # by digest; of unused tables, the one unused for longest comes first
        self.unwritten: list[tuple[Automaton, int]] = []  # tables to write to the device, with their first blocks

    def check(self, automaton: Automaton | None) -> None:
        """Raise UserError if the pool can never hold the automaton's table."""
        if automaton is None:
            return
        num_states = len(automaton.next)
        need, room = num_blocks(automaton), self.num_blocks
        if len(automaton.classes) != self.vocab_size:
            raise UserError(
                f"the grammar is built for {len(automaton.classes)} token ids, the model has {self.vocab_size}: build "
                "it for this model"
            )
        if not room:
            raise UserError("grammar_pool_mib=0 turns grammars off: raise it")
        if num_states > MAX_STATES:
            raise UserError(f"the grammar has {num_states} states, at most {MAX_STATES} fit: simplify it")
        if need > room:
            raise UserError(
                f"the grammar's table takes {need / BLOCKS_PER_MIB:.1f} MiB, the pool of all grammars has "
                f"{room // BLOCKS_PER_MIB}: simplify the grammar or raise grammar_pool_mib"
            )

    def hold(self, automaton: Automaton) -> int | None:
        """Count a request as a user of the automaton's table. Return the index of the table's first 16-bit word.

        A table that is not in the pool takes the place of tables without users, and is added to `unwritten`, the tables
        that are still to be copied to the device. Return None if tables of running requests leave no room. The method
        `release` ends the use.
        """
        known = self.resident.get(automaton.digest)
        if known is None:
            size = num_blocks(automaton)
            while (first := self.gap(size)) is None:
                unused = next((digest for digest, table in self.resident.items() if not table.users), None)
                if unused is None:
                    return None
                del self.resident[unused]
            known = self.resident[automaton.digest] = Resident(first, size)
            self.unwritten.append((automaton, first))
        known.users += 1
        return known.first * BLOCK

    def gap(self, size: int) -> int | None:
        """Return the first block of the first `size` free blocks in a row; None if there are not so many."""
        first = 0
        for table in sorted(self.resident.values(), key=lambda table: table.first):
            if table.first - first >= size:
                break
            first = table.first + table.size
        return first if first + size <= self.num_blocks else None

    def release(self, automaton: Automaton) -> None:
        """Record that one request fewer uses the automaton's table."""
        table = self.resident.pop(automaton.digest)
        table.users -= 1
        self.resident[automaton.digest] = table  # now the last of the unused tables

    def take_unwritten(self) -> list[tuple[Automaton, int]]:
        """Return the tables to write to the device, with their first blocks, and forget them."""
        unwritten, self.unwritten = self.unwritten, []
        return unwritten


def writes(automaton: Automaton, first: int) -> Iterator[Plan]:
    """Yield the plans that write an automaton's table to the pool. first: its first block."""
    yield from (write(block, first + i) for i, block in enumerate(blocks(automaton)))


def write(block: Any, index: int) -> Plan:
    """Return the plan that writes a block, i32[BLOCK / 2], to this place in the pool, counted in blocks."""
    return Plan("write_grammar", (block, np.array(index, np.int32)))


def end_ids(automaton: Automaton) -> tuple[int, ...]:
    """Return the token ids that end a text of the automaton's grammar."""
    is_end: Any = automaton.next[automaton.end] != FORBIDDEN
    return tuple(np.flatnonzero(is_end[automaton.classes]).tolist())

"""Grammars: forbids the token ids that are not legal in a row's state of its grammar's automaton.

The tables of all grammars lie in one array of 16-bit words on the device, the pool. The table of an automaton of S
states and C classes takes V words, the class of each token id, and then S * C words: the next state of each state and
class, or FORBIDDEN. It is padded to whole blocks, so that one small program writes tables of every size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.sampling.arrays import filled
from jaxspec.sampling.processors.base import Place, Processor, Text

BLOCK = 1 << 17  # words of a block: 256 KiB
BLOCKS_PER_MIB = (1 << 20) // (2 * BLOCK)
FORBIDDEN = 0xFFFF  # word of a class that is not legal in a state
MAX_STATES = FORBIDDEN  # states are numbered by words other than FORBIDDEN
STEP = 256  # classes of a step on TPU; most grammars have fewer
FREE = -1  # state of a row without a grammar, and after a draft token that is not legal; it forbids nothing


class Tables(NamedTuple):
    """The tables of the rows' grammars during a launch.

    pool u16[_]: words of all grammars.
    classes u16[B,V]: class of each token id.
    first i32[B]: index in the pool of the next states of state 0.
    """

    pool: jax.Array
    classes: jax.Array
    first: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Grammar(Processor):
    """The processor that sets the logits of ids to -inf that are not legal in the row's state.

    A draft token that is not legal leads to the state FREE. The target rejects this token, because its probability is
    0, so the logits after it do not matter.

    at i32[B]: index in the pool of the row's table.
    width i32[B]: number of classes C.
    state i32[B]: state at the start of the launch; FREE for a row without a grammar.
    """

    at: jax.Array
    width: jax.Array
    state: jax.Array

    @classmethod
    def of_requests(cls, requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> Grammar:
        return cls(
            at=filled(rows, [r.grammar_at or 0 for r in requests], np.int32),
            width=filled(rows, [r.automaton.next.shape[1] if r.automaton else 0 for r in requests], np.int32),
            state=filled(rows, [r.grammar_state if r.automaton else FREE for r in requests], np.int32, FREE),
        )

    def tables(self, text: Text, pool: jax.Array | None) -> Tables:
        assert pool is not None
        classes = jax.vmap(lambda at: lax.dynamic_slice(pool, (at,), (text.vocab_size,)))(self.at)
        return Tables(pool, classes, self.at + text.vocab_size)

    def init(self, text: Text) -> Int[Array, " B"]:
        return self.state

    def apply(self, tables: Any, state: Any, logits: Float[Array, "B V"], place: Place) -> Float[Array, "B V"]:
        now = state_after(tables, self.width, state, jnp.where(offsets(place) < place.i[:, None], place.drafts, -1))
        now = lax.optimization_barrier(now)  # else the compiler may follow the drafts anew for each id
        at = row_of(tables, self.width, now)
        legal = lax.platform_dependent(tables, at, self.width, tpu=legal_by_bits, default=legal_by_index)
        return jnp.where(legal | (now == FREE)[:, None], logits, -jnp.inf)

    def advance(self, tables: Any, state: Any, emitted: Int[Array, "B _"]) -> Int[Array, " B"]:
        result: Int[Array, " B"] = state_after(tables, self.width, state, emitted)
        return result


def offsets(place: Place) -> Int[Array, " K"]:
    """Return the index of each draft token in its round."""
    return jnp.arange(place.drafts.shape[1], dtype=jnp.int32)


def read(pool: jax.Array, index: jax.Array) -> jax.Array:
    """Return pool[index]. An index beyond the pool, which a row without a grammar may have, reads some other word."""
    return pool.at[index].get(mode="clip")


def row_of(tables: Tables, width: Int[Array, " B"], state: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the index in the pool of the next states of each row's state."""
    return tables.first + jnp.maximum(state, 0) * width


def legal_by_index(tables: Tables, at: Int[Array, " B"], width: Int[Array, " B"]) -> Bool[Array, "B V"]:
    """Return whether each id is legal, by its word among the next states, which begin at index `at` of the pool.

    On GPU this lookup becomes a part of the operation that reads the logits.
    """
    return read(tables.pool, at[:, None] + tables.classes) != FORBIDDEN


def legal_by_bits(tables: Tables, at: Int[Array, " B"], width: Int[Array, " B"]) -> Bool[Array, "B V"]:
    """Compute `legal_by_index` without a lookup for each id, which is slow on TPU.

    A step reads STEP classes and packs them into numbers of 32 bits. Each id selects its number and its bit.
    """
    lane, numbers = jnp.arange(32, dtype=jnp.uint32), STEP // 32
    own_number, own_lane = tables.classes // 32, (tables.classes % 32).astype(jnp.uint32)

    def step(i: Any, legal: jax.Array) -> jax.Array:
        words = read(tables.pool, (at + STEP * i)[:, None] + jnp.arange(STEP)).reshape(-1, numbers, 32)
        bits = jnp.sum(jnp.where(words != FORBIDDEN, jnp.uint32(1) << lane, 0), axis=2, dtype=jnp.uint32)
        chosen = jnp.zeros(tables.classes.shape, jnp.uint32)
        for j in range(numbers):
            chosen = jnp.where(own_number == numbers * i + j, bits[:, j, None], chosen)
        found: jax.Array = legal | ((chosen >> own_lane) & 1 == 1)
        return found

    none = jnp.zeros(tables.classes.shape, bool)
    result: Bool[Array, "B V"] = lax.fori_loop(0, -(-jnp.max(width) // STEP), step, none)
    return result


@jax.jit  # lowered once for all places of a round
def state_after(
    tables: Tables, width: Int[Array, " B"], state: Int[Array, " B"], tokens: Int[Array, "B _"]
) -> Int[Array, " B"]:
    """Return each row's state after its tokens; FREE once a token was not legal.

    width: number of classes of each row's automaton.
    state: state of each row before the tokens.
    tokens: tokens of each row, padded with -1.
    """
    for token in tokens.T:
        own = jnp.take_along_axis(tables.classes, token[:, None], axis=1, mode="clip")[:, 0]
        word = read(tables.pool, row_of(tables, width, state) + own).astype(jnp.int32)
        new = jnp.where((state == FREE) | (word == FORBIDDEN), FREE, word)
        state = jnp.where(token < 0, state, new)
    return state


def blocks(automaton: Any) -> Any:
    """Return the table of an automaton as blocks i32[n, BLOCK / 2], with two words in each number."""
    table = np.concatenate([automaton.classes, automaton.next.astype(np.uint16).reshape(-1)])  # -1 becomes FORBIDDEN
    table = np.pad(table, (0, -len(table) % BLOCK))
    return table.view(np.int32).reshape(-1, BLOCK // 2)


def num_blocks(automaton: Any) -> int:
    """Return the number of blocks of an automaton's table."""
    size: int = len(automaton.classes) + automaton.next.size
    return -(-size // BLOCK)


def pool_shape(mib: int, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a pool of this many MiB. sharding: that of an array of which each device has the whole."""
    return jax.ShapeDtypeStruct((mib * BLOCKS_PER_MIB * BLOCK,), jnp.uint16, sharding=sharding)


def empty_pool(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a pool of zeros, created on its devices."""
    zeroed: jax.Array = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)()
    return zeroed


def write_grammar(
    config: Any, params: Any, pool: jax.Array, block: Int[Array, " _"], index: Int[Array, ""]
) -> tuple[jax.Array, None]:
    """Write a block of a table to the pool. index: the block's place in the pool, counted in blocks.

    Return the pool, and None, because this program has no other result.
    """
    words = lax.bitcast_convert_type(block, jnp.uint16).reshape(-1)
    return lax.dynamic_update_slice(pool, words, (index * BLOCK,)), None

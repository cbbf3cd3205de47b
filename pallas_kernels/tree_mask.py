"""The tree mask: which keys each token of a pass sees when the tokens are nodes of a tree, packed as bits.

Words of bits rather than a table: a kernel holds a few words of each query, and tests a block of keys against them at
once.
"""

import jax
import jax.numpy as jnp

POSITION, FIRST_NODE, WORDS = range(3)  # indices of the last axis of `tree`: see `paged_attention`
BITS = 32  # of a word


def packed(position: jax.Array, first: jax.Array, seen: jax.Array) -> jax.Array:
    """Return the argument `tree` of `paged_attention`, i32[B, T, 2 + W].

    Args:
      position: i32[B, T], positions of the queries.
      first: i32[B], position of the slot of each row's first node.
      seen: bool[B, T, C], which of the C nodes from that slot on each query sees.
    """
    b, t, c = seen.shape
    words = -(-c // BITS)
    bits = jnp.pad(seen, ((0, 0), (0, 0), (0, words * BITS - c))).reshape(b, t, words, BITS).astype(jnp.uint32)
    values = jnp.sum(bits << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    ends = jnp.stack([position, jnp.broadcast_to(first[:, None], (b, t))], axis=-1).astype(jnp.int32)
    return jnp.concatenate([ends, jax.lax.bitcast_convert_type(values, jnp.int32)], axis=-1)


def sees(words, node):
    """Return whether queries see keys, as bools.

    Args:
      words: the W words of the queries, a list of i32 arrays.
      node: i32, the keys' indices among the nodes; below 0 for the keys before all nodes. Broadcasts against each word.
    """
    seen = node < 0
    for i, word in enumerate(words):
        bit = node - i * BITS
        here = (bit >= 0) & (bit < BITS)
        seen |= here & ((jax.lax.shift_right_logical(*jnp.broadcast_arrays(word, jnp.where(here, bit, 0))) & 1) == 1)
    return seen

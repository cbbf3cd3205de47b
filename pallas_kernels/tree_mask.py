"""The tree mask: which keys each token of a pass sees if the tokens are nodes of a tree of drafts.

The mask is packed into words of bits. So a kernel needs only a few words of each query, and can test a whole block of
keys against them at once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

POSITION, FIRST_NODE, WORDS = range(3)  # indices on the last axis of the argument `tree` of `paged_attention`
BITS = 32  # number of bits in a word of the mask


def packed(position: jax.Array, first: jax.Array, seen: jax.Array) -> jax.Array:
    """Pack a tree mask. Return the argument `tree` of `paged_attention`, i32[B, T, 2 + W].

    Args:
      position: i32[B, T], positions of the queries in the text.
      first: i32[B], position in each row's cache of the slot of its first node. The slots of all C nodes are
        consecutive.
      seen: bool[B, T, C], whether each query sees each of the C nodes.
    """
    b, t, c = seen.shape
    words = -(-c // BITS)
    bits = jnp.pad(seen, ((0, 0), (0, 0), (0, words * BITS - c))).reshape(b, t, words, BITS).astype(jnp.uint32)
    values = jnp.sum(bits << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    ends = jnp.stack([position, jnp.broadcast_to(first[:, None], (b, t))], axis=-1).astype(jnp.int32)
    return jnp.concatenate([ends, jax.lax.bitcast_convert_type(values, jnp.int32)], axis=-1)


def sees(words: Sequence[jax.Array], node: jax.Array) -> jax.Array:
    """Return bools: whether queries see keys, according to a packed tree mask.

    Args:
      words: the W words of the mask for the queries, a list of i32 arrays.
      node: i32 array, index of each key among the nodes, below 0 for keys before all nodes. It must broadcast against
        each word.
    """
    seen = node < 0
    for i, word in enumerate(words):
        bit = node - i * BITS
        here = (bit >= 0) & (bit < BITS)
        seen |= here & ((jax.lax.shift_right_logical(*jnp.broadcast_arrays(word, jnp.where(here, bit, 0))) & 1) == 1)
    return seen

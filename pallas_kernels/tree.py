"""Tokens of a pass that are nodes of a tree: which of the tree's keys each of them sees, as bits.

Words rather than a table: a kernel holds a few numbers of each query, and asks them about a block of keys at once.
"""

import jax
import jax.numpy as jnp

POSITION, FIRST_NODE, WORDS = range(3)  # of the last axis of `tree`: see `paged_attention`
BITS = 32


def packed(position: jax.Array, first: jax.Array, seen: jax.Array) -> jax.Array:
    """`tree` of `paged_attention`: position i32[B, T] of the queries, first i32[B] of the nodes' slots, seen
    bool[B, T, C], which of the C nodes from there on each query sees."""
    (b, t, c), words = seen.shape, -(-seen.shape[2] // BITS)
    bits = jnp.pad(seen, ((0, 0), (0, 0), (0, words * BITS - c))).reshape(b, t, words, BITS).astype(jnp.uint32)
    values = jnp.sum(bits << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    ends = jnp.stack([position, jnp.broadcast_to(first[:, None], (b, t))], axis=-1).astype(jnp.int32)
    return jnp.concatenate([ends, jax.lax.bitcast_convert_type(values, jnp.int32)], axis=-1)


def sees(words, node):
    """Whether a query sees keys: words, a list of its W, and node, the keys' places among the nodes (below 0: before
    them), which broadcast against each other."""
    seen = node < 0
    for i, word in enumerate(words):
        bit = node - i * BITS
        here = (bit >= 0) & (bit < BITS)
        seen |= here & ((jax.lax.shift_right_logical(*jnp.broadcast_arrays(word, jnp.where(here, bit, 0))) & 1) == 1)
    return seen

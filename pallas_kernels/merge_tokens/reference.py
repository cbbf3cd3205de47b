"""The op merge_tokens in plain jnp: one gather."""

import jax
import jax.numpy as jnp


def merge_tokens(
    tokens: jax.Array, next_tokens: jax.Array, query_start: jax.Array, num_rejected: jax.Array, *, fill: int
) -> tuple[jax.Array, jax.Array]:
    """Merge the rows with one gather from tokens and next_tokens."""
    (t,), (b,) = tokens.shape, next_tokens.shape
    i = jnp.arange(t + b, dtype=jnp.int32)
    new_end = query_start[1:] + jnp.arange(1, b + 1, dtype=jnp.int32)  # ends of merged rows, of which none is empty
    row = jnp.searchsorted(new_end, i, side="right", method="compare_all").astype(jnp.int32)
    tail = row == b
    row = jnp.minimum(row, b - 1)

    last = new_end[row] - 1 - num_rejected[row]  # output index of the row's next token
    source = jnp.where(i < last, i - row, t + row)
    rejected = tail | (i > last)
    merged = jnp.concatenate([tokens, next_tokens])[source]
    return jnp.where(rejected, jnp.int32(fill), merged), rejected

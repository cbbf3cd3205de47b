"""The op slot_mapping in plain jnp."""

import jax
import jax.numpy as jnp


def slot_mapping(
    positions: jax.Array,
    rejected: jax.Array,
    query_start: jax.Array,
    block_table: jax.Array,
    *,
    page_size: int,
    max_model_len: int,
    pad_slot: int,
) -> jax.Array:
    """Find the row of each element, then look up its page in the row's block table."""
    b, n = block_table.shape
    i = jnp.arange(positions.shape[0], dtype=jnp.int32)
    new_end = query_start[1:] + jnp.arange(1, b + 1, dtype=jnp.int32)
    row = jnp.searchsorted(new_end, i, side="right", method="compare_all").astype(jnp.int32)
    live = ~rejected & (row < b) & (positions >= 0) & (positions < min(max_model_len, n * page_size))

    # Positions may be beyond the N pages of the block table. Reads are clamped to the table; `live` excludes such
    # elements from the result.
    page = block_table[jnp.minimum(row, b - 1), jnp.clip(positions // page_size, 0, n - 1)]
    live &= page < pad_slot // page_size
    return jnp.where(live, page * page_size + positions % page_size, pad_slot)

"""slot_mapping in plain jnp."""

import jax.numpy as jnp


def slot_mapping(positions, rejected, query_start, block_table, *, page_size, max_model_len, pad_slot):
    b, n = block_table.shape
    i = jnp.arange(positions.shape[0], dtype=jnp.int32)
    new_end = query_start[1:] + jnp.arange(1, b + 1, dtype=jnp.int32)
    row = jnp.searchsorted(new_end, i, side="right", method="compare_all").astype(jnp.int32)
    live = ~rejected & (row < b) & (positions >= 0) & (positions < min(max_model_len, n * page_size))

    # Positions may exceed the N pages of the table. Clamp the reads; `live` excludes such elements.
    page = block_table[jnp.minimum(row, b - 1), jnp.clip(positions // page_size, 0, n - 1)]
    live &= page < pad_slot // page_size
    return jnp.where(live, page * page_size + positions % page_size, pad_slot)

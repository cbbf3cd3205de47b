import jax

from pallas_kernels.forms import Op, Where, check_shape, mosaic, plain, triton

# A few vector operations, which XLA fuses with their neighbours; a kernel of their own only adds a launch (H200: merge
# and slots 4 us fused, 6 to 7 as kernels).
OP = Op("slot_mapping", (mosaic(), triton(), plain()))


def slot_mapping(
    positions: jax.Array,
    rejected: jax.Array,
    query_start: jax.Array,
    block_table: jax.Array,
    *,
    page_size: int,
    max_model_len: int,
    pad_slot: int,
    implementation: str | None = None,
    platform: Where = None,
) -> jax.Array:
    """The cache slot of every merged token: page * page_size + offset, or `pad_slot` where nothing is to be written.

    An element gets `pad_slot` if it is rejected, if its position is negative or not below
    `min(max_model_len, N * page_size)`, if its row has no page there, or if it belongs to the padded tail.

    Args:
      positions: i32[T+B], as merged by `merge_tokens`; T may be 0.
      rejected: bool[T+B], from `merge_tokens`.
      query_start: i32[B+1], the layout *before* the merge: row b owns `query_start[b] + b : query_start[b+1] + b + 1`.
      block_table: i32[B, N], page ids; `num_pages` where no page is assigned, never negative.
      page_size, max_model_len: positions in a page, positions a row may have.
      pad_slot: `num_pages * page_size`, one beyond the last slot; never -1, because negative indices wrap.
      implementation: None (the best known for these arrays there), "reference" (plain jnp) or "pallas" (a kernel where
        there is one for them).
      platform: None (the default backend), "cpu", "gpu", "tpu" or a `Device`; name it when compiling for another.

    Returns:
      slots i32[T+B].

    Raises:
      ValueError: shapes that do not fit, a `pad_slot` that is no multiple of `page_size`, an unknown implementation or
        platform.
    """
    b, _ = block_table.shape
    check_shape("slot_mapping", "query_start", query_start, b + 1)
    check_shape("slot_mapping", "rejected", rejected, *positions.shape)
    if pad_slot % page_size:
        raise ValueError(f"slot_mapping: pad_slot {pad_slot} must be num_pages * page_size, page_size is {page_size}")
    options = {"page_size": page_size, "max_model_len": max_model_len, "pad_slot": pad_slot}
    return OP.run(implementation, platform, positions, rejected, query_start, block_table, **options)

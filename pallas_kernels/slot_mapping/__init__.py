import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton

# Plain jnp is the best form everywhere: XLA fuses these few vector operations with their neighbours. A kernel adds a
# launch (merge_tokens and slot_mapping together on an H200: 4 us fused, 6 to 7 us as kernels).
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
    platform: DeviceLike = None,
) -> jax.Array:
    """Return the cache slot of every merged token: page * page_size + offset, or `pad_slot` to write nothing.

    An element gets `pad_slot` if it is rejected, if its position is negative or not below
    `min(max_model_len, N * page_size)`, if its row has no page for the position, or if it belongs to the padded tail.

    Args:
      positions: i32[T+B], as merged by `merge_tokens`; T may be 0.
      rejected: bool[T+B], from `merge_tokens`.
      query_start: i32[B+1], the layout *before* the merge: row b owns `query_start[b] + b : query_start[b+1] + b + 1`.
      block_table: i32[B, N], page ids; `num_pages` where no page is assigned, never negative.
      page_size: positions of a page.
      max_model_len: positions that a row may have.
      pad_slot: `num_pages * page_size`, one beyond the last slot; never -1, because negative indices wrap.
      implementation: None (the best known form for these arrays on the platform), "reference" (plain jnp) or "pallas"
        (the kernel where one covers these arrays, else plain jnp).
      platform: "cpu", "gpu", "tpu" or a `Device`, to compile for another platform; None: the default backend.

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

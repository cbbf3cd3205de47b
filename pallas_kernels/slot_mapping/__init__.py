"""The op slot_mapping, which computes the cache slots of tokens."""

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton

# Plain jnp is the best form on all platforms: XLA fuses these few vector operations with their neighbours. A separate
# kernel takes time to start (merge_tokens and slot_mapping together on an H200: 4 us fused, 6 to 7 us as kernels).
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
    """Return the cache slot of every token that `merge_tokens` returned: page id * page_size + offset in the page.

    An element gets `pad_slot`, which means that nothing is written, in these cases: it is rejected; its position is
    negative, or not below `min(max_model_len, N * page_size)`; its row has no page for the position; or it is padding
    after the last row.

    Args:
      positions: i32[T+B], positions of the tokens, merged by `merge_tokens`; T may be 0.
      rejected: bool[T+B], the second result of `merge_tokens`.
      query_start: i32[B+1], the argument of `merge_tokens`, which describes the rows *before* the merge. After it, row
        b owns the elements `query_start[b] + b : query_start[b+1] + b + 1`.
      block_table: i32[B, N], page ids; `num_pages` where no page is assigned, never negative.
      page_size: number of positions of a page.
      max_model_len: largest number of positions that a row may have.
      pad_slot: `num_pages * page_size`, one beyond the last slot; never -1, because negative indices wrap.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      i32[T+B], the slots.

    Raises:
      ValueError: shapes that do not fit each other, a `pad_slot` that is not a multiple of `page_size`, an unknown
        implementation or platform.
    """
    b, _ = block_table.shape
    check_shape("slot_mapping", "query_start", query_start, b + 1)
    check_shape("slot_mapping", "rejected", rejected, *positions.shape)
    if pad_slot % page_size:
        raise ValueError(f"slot_mapping: pad_slot {pad_slot} must be num_pages * page_size, page_size is {page_size}")
    options = {"page_size": page_size, "max_model_len": max_model_len, "pad_slot": pad_slot}
    result: jax.Array = OP.run(implementation, platform, positions, rejected, query_start, block_table, **options)
    return result

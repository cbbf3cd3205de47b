import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton

# Plain jnp is the best form everywhere: XLA fuses these few vector operations with their neighbours. A kernel adds a
# launch (merge_tokens and slot_mapping together on an H200: 4 us fused, 6 to 7 us as kernels).
OP = Op("merge_tokens", (mosaic(), triton(), plain()))


def merge_tokens(
    tokens: jax.Array,
    next_tokens: jax.Array,
    query_start: jax.Array,
    num_rejected: jax.Array,
    *,
    fill: int = 0,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> tuple[jax.Array, jax.Array]:
    """Extend every row by one token: its next token follows its last accepted token.

    Row b owns `tokens[query_start[b] : query_start[b+1]]`, of which the last `num_rejected[b]` were rejected. In the
    output it owns `query_start[b] + b : query_start[b+1] + b + 1`: the accepted tokens, `next_tokens[b]`, and `fill`
    for each rejected token. Positions can be merged in the same way.

    Args:
      tokens: i32[T], the rows one after the other; T may be padded beyond `query_start[B]`, and may be 0.
      next_tokens: i32[B].
      query_start: i32[B+1], non-decreasing from 0, the layout before the merge.
      num_rejected: i32[B], between 0 and the row's length.
      fill: value at rejected and padded elements; a valid token id, because the embedding table is read at it.
      implementation: None (the best known form for these arrays on the platform), "reference" (plain jnp) or "pallas"
        (the kernel where one covers these arrays, else plain jnp).
      platform: "cpu", "gpu", "tpu" or a `Device`, to compile for another platform; None: the default backend.

    Returns:
      merged i32[T+B] and rejected bool[T+B], True at every rejected or padded element.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    (b,) = next_tokens.shape
    check_shape("merge_tokens", "query_start", query_start, b + 1)
    check_shape("merge_tokens", "num_rejected", num_rejected, b)
    return OP.run(implementation, platform, tokens, next_tokens, query_start, num_rejected, fill=fill)

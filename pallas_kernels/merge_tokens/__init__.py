import jax

from pallas_kernels.forms import Op, Where, check_shape, mosaic, plain, triton

# A few vector operations, which XLA fuses with their neighbours; a kernel of their own only adds a launch (H200: merge
# and slots 4 us fused, 6 to 7 as kernels).
OP = Op("merge_tokens", (mosaic(), triton(), plain()))


def merge_tokens(
    tokens: jax.Array,
    next_tokens: jax.Array,
    query_start: jax.Array,
    num_rejected: jax.Array,
    *,
    fill: int = 0,
    implementation: str | None = None,
    platform: Where = None,
) -> tuple[jax.Array, jax.Array]:
    """Extends every row by one token: its next token follows the last token that was kept.

    Row b owns `tokens[query_start[b] : query_start[b+1]]`, of which the last `num_rejected[b]` were rejected. In the
    output it owns `query_start[b] + b : query_start[b+1] + b + 1`: the kept tokens, `next_tokens[b]`, and `fill` for
    each rejected one. Merges positions just as well.

    Args:
      tokens: i32[T], the rows one after the other; T may be padded beyond `query_start[B]`, and may be 0.
      next_tokens: i32[B].
      query_start: i32[B+1], non-decreasing from 0, the layout before the merge.
      num_rejected: i32[B], between 0 and the row's length.
      fill: value at rejected and padded elements; a valid token id, because it goes through the embedding table.
      implementation: None (the best known for these arrays there), "reference" (plain jnp) or "pallas" (a kernel where
        there is one for them).
      platform: None (the default backend), "cpu", "gpu", "tpu" or a `Device`; name it when compiling for another.

    Returns:
      merged i32[T+B] and rejected bool[T+B], which flags every element that is `fill`.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    (b,) = next_tokens.shape
    check_shape("merge_tokens", "query_start", query_start, b + 1)
    check_shape("merge_tokens", "num_rejected", num_rejected, b)
    return OP.run(implementation, platform, tokens, next_tokens, query_start, num_rejected, fill=fill)

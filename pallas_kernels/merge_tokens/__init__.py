"""The op merge_tokens, which appends one token to every row of a ragged batch."""

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, triton

# By default plain jnp is used on all platforms, not the kernels: XLA fuses these few vector operations with their
# neighbours. A kernel of its own takes time to start (merge_tokens and slot_mapping on an H200: 4 us fused, 6 to 7 us
# as kernels).
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
    """Extend every row by one token, which follows the row's last accepted token.

    Row b owns `tokens[query_start[b] : query_start[b+1]]`, of which the last `num_rejected[b]` were rejected. In the
    output, row b owns the elements `query_start[b] + b : query_start[b+1] + b + 1`: its accepted tokens,
    `next_tokens[b]`, and `fill` for each rejected token. Positions can be merged in the same way.

    Args:
      tokens: i32[T], the rows' tokens, one row after the other; T may be padded beyond `query_start[B]`, and may be 0.
      next_tokens: i32[B], the token to append to each row.
      query_start: i32[B+1], non-decreasing from 0: the first index of each row in `tokens`, and the end of the last.
      num_rejected: i32[B], number of rejected tokens of each row, at most the row's length.
      fill: value of rejected and padded elements; a valid token id, because their embeddings are looked up too.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      merged i32[T+B], the extended rows; and rejected bool[T+B], True for every rejected or padded element.

    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation or platform.
    """
    (b,) = next_tokens.shape
    check_shape("merge_tokens", "query_start", query_start, b + 1)
    check_shape("merge_tokens", "num_rejected", num_rejected, b)
    result: tuple[jax.Array, jax.Array] = OP.run(
        implementation, platform, tokens, next_tokens, query_start, num_rejected, fill=fill
    )
    return result

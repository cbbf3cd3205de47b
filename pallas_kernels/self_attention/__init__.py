"""The op self_attention, which computes the first half of a decoder layer."""

from typing import Any

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, plain, triton
from pallas_kernels.pages import AnyPages
from pallas_kernels.weights import AnyWeight

OP = Op("self_attention", (triton(best=True), plain("device", "implementation")))


def self_attention(
    x: jax.Array,
    qkv: AnyWeight,
    pages: AnyPages,
    slots: jax.Array,
    block_table: jax.Array,
    kv_len: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    norm: jax.Array | None = None,
    normed: jax.Array | None = None,
    eps: float,
    bias: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    v_norm: bool = False,
    next_out: AnyWeight | None = None,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    query_factor: jax.Array | None = None,
    num_queries: int | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sum_over: tuple[str, ...] = (),
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> tuple[jax.Array, AnyPages]:
    """Compute the first half of a decoder layer: norm, qkv projection, rotary embedding, cache write and attention.

    Args:
      x: [B, T, E], the layer's input for the last T tokens of every row.
      qkv: [E, G * (H / G + 2) * D], merged weights of queries, keys and values, as a plain array or any `Weight`. The
        columns are grouped by key-value head: its queries, its key, its value.
      pages: [P, S, 2G, D'], keys (even index) and values (odd index) interleaved by head; D' >= D pads the head size. A
        plain array or `ScaledPages`.
      slots: i32[B * T] from `slot_mapping`, the slots of the tokens' keys and values. Nothing is written for a token
        whose slot is outside the pages.
      block_table: i32[B, N], page ids, as in `paged_attention`.
      kv_len: i32[B], as in `paged_attention`: token t of row b has position `kv_len[b] - T + t`.
      cos: f32[B, T, D / 2], cosine of the tokens' rotary angles.
      sin: f32[B, T, D / 2], sine of the tokens' rotary angles.
      norm: f32[E], scale of the RMSNorm of x; None if normed is given.
      normed: [B, T, E], the normed x, if an earlier op has computed it; or None. As `feed_forward` returns it.
      eps: epsilon of all norms.
      bias: bias of the product with qkv, or None.
      q_norm: f32[D], scale of an RMSNorm of each query head; f32[H, D], scale of one RMSNorm of all heads; or None.
      k_norm: f32[D] or f32[G, D], likewise for key heads, or None.
      v_norm: whether an RMSNorm without a scale is applied to each value head. No kernel does this yet.
      next_out: [H * D, ...], the weight matrix that the next op reads first, or None. A kernel may prefetch it.
      num_keys: i32[B], as in `paged_attention`: the number of positions that are written; None for all of kv_len.
      tree: i32[B, num_queries, 2 + W], as in `paged_attention`: which tree nodes each token sees; None for a chain.
      query_factor: f32[B, T], factor of each token's queries after rotation, or None. No kernel reads it yet.
      num_queries: number of tokens of a row, the last ones, that are queries; None for all T. Other tokens only give
        keys and values.
      scale: factor of the scores, as in `paged_attention`.
      window: number of positions that a query sees, as in `paged_attention`.
      soft_cap: bound on the absolute value of scores, as in `paged_attention`.
      sum_over: mesh axes over which heads are sharded, inside `jax.shard_map`, for norms of all heads together.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      The heads' results, [B, num_queries, H * D], and the updated pages. The results are a `Prepared` if a kernel has
      computed sums of them that the product with next_out reads. A token that is not written, because its slot is
      outside the pages, must be at a position that no query in use sees.

    Raises:
      ValueError: shapes that do not fit each other, an unknown implementation or platform.
    """
    b, t, e = x.shape
    d = 2 * cos.shape[-1]
    g = pages.shape[2] // 2
    check_shape("self_attention", "qkv", qkv, e, *qkv.shape[1:])
    check_shape("self_attention", "slots", slots, b * t)
    check_shape("self_attention", "kv_len", kv_len, b)
    check_shape("self_attention", "block_table", block_table, b, *block_table.shape[1:])
    check_shape("self_attention", "cos", cos, b, t, d // 2)
    check_shape("self_attention", "sin", sin, b, t, d // 2)
    if qkv.shape[1] % (g * d) or qkv.shape[1] < 3 * g * d:
        raise ValueError(f"self_attention: {qkv.shape[1]} columns of qkv do not divide into {g} key-value heads of {d}")
    arrays = (
        x,
        norm,
        normed,
        qkv,
        bias,
        q_norm,
        k_norm,
        pages,
        slots,
        block_table,
        kv_len,
        cos,
        sin,
        next_out,
        num_keys,
        tree,
        query_factor,
    )
    options: dict[str, Any] = {"eps": eps, "scale": scale, "window": window, "soft_cap": soft_cap}
    if sum_over:
        options["sum_over"] = sum_over
    if v_norm:
        options["v_norm"] = True
    options["num_queries"] = t if num_queries is None else num_queries
    result: tuple[jax.Array, AnyPages] = OP.run(implementation, platform, *arrays, **options)
    return result

import jax

from pallas_kernels.forms import Op, Where, check_shape, plain, triton
from pallas_kernels.weights import AnyWeight

OP = Op("self_attention", (triton(best=True), plain("device", "implementation")))


def self_attention(
    x: jax.Array,
    qkv: AnyWeight,
    pages: jax.Array,
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
    next_out: AnyWeight | None = None,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    num_queries: int | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    platform: Where = None,
) -> tuple[jax.Array, jax.Array]:
    """The first half of a decoder layer: norm, queries, keys and values, rotary embedding, cache write, attention.

    Args:
      x: [B, T, E], the last T tokens of every row.
      qkv: [E, G * (H / G + 2) * D], columns grouped by key-value head: its queries, its key, its value. In any form.
      pages: [P, S, 2G, D'], keys (even index) and values (odd index) interleaved by head; D' >= D pads the head size.
      slots: i32[B * T] from `slot_mapping`, where the tokens' keys and values go; those outside the pool are dropped.
      block_table: i32[B, N], page ids, as in `paged_attention`.
      kv_len: i32[B], as in `paged_attention`: token t of row b stands at position `kv_len[b] - T + t`.
      cos, sin: f32[B, T, D / 2], the tokens' rotary angles.
      norm: f32[E], scale of the RMSNorm of x; None where normed is given.
      normed: [B, T, E], x normed by it, where it is there already; or None.
      eps: of all norms.
      bias: of qkv, or None.
      q_norm, k_norm: f32[D], scales of RMSNorms of the heads; None for none.
      next_out: [H * D, ...], the matrix that the next op reads first: a kernel may ask for it ahead.
      num_keys: i32[B], as in `paged_attention`: the positions that are written, or None for all of kv_len.
      tree: i32[B, num_queries, 2 + W], as in `paged_attention`: which nodes of a tree the tokens see; None for a chain.
      num_queries: how many of the last tokens look at others; None for all T. The rest are only looked at.
      scale, window, soft_cap: as in `paged_attention`.
      implementation: None (the best known for these arrays there), "reference" (plain jnp) or "pallas" (a kernel where
        there is one for them).
      platform: None (the default backend), "cpu", "gpu", "tpu" or a `Device`; name it when compiling for another.

    Returns:
      [B, num_queries, H * D], the heads' results, and pages, updated. A token that is not written may stand only where
      no live query looks.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
    """
    (b, t, e), d = x.shape, 2 * cos.shape[-1]
    g = pages.shape[2] // 2
    check_shape("self_attention", "qkv", qkv, e, *qkv.shape[1:])
    check_shape("self_attention", "slots", slots, b * t)
    check_shape("self_attention", "kv_len", kv_len, b)
    check_shape("self_attention", "block_table", block_table, b, *block_table.shape[1:])
    check_shape("self_attention", "cos", cos, b, t, d // 2)
    check_shape("self_attention", "sin", sin, b, t, d // 2)
    if qkv.shape[1] % (g * d) or qkv.shape[1] < 3 * g * d:
        raise ValueError(f"self_attention: {qkv.shape[1]} columns are no groups of {g} key-value heads of {d}")
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
    )
    options = {"eps": eps, "scale": scale, "window": window, "soft_cap": soft_cap}
    options["num_queries"] = t if num_queries is None else num_queries
    return OP.run(implementation, platform, *arrays, **options)

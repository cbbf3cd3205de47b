import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, plain, triton
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
    platform: DeviceLike = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the first half of a decoder layer: norm, qkv, rotary embedding, cache write and attention.

    Args:
      x: [B, T, E], the last T tokens of every row.
      qkv: [E, G * (H / G + 2) * D], columns grouped by key-value head: its queries, its key, its value. Any form of
        weight.
      pages: [P, S, 2G, D'], keys (even index) and values (odd index) interleaved by head; D' >= D pads the head size.
      slots: i32[B * T] from `slot_mapping`, the slots of the tokens' keys and values. Slots outside the pool are
        dropped.
      block_table: i32[B, N], page ids, as in `paged_attention`.
      kv_len: i32[B], as in `paged_attention`: token t of row b has position `kv_len[b] - T + t`.
      cos, sin: f32[B, T, D / 2], cosine and sine of the tokens' rotary angles.
      norm: f32[E], scale of the RMSNorm of x; None if normed is given.
      normed: [B, T, E], the normed x, if an earlier op has computed it; or None.
      eps: epsilon of all norms.
      bias: bias of qkv, or None.
      q_norm, k_norm: f32[D], scales of RMSNorms of the heads, or None.
      next_out: [H * D, ...], the matrix that the next op reads first, or None. A kernel may prefetch it.
      num_keys: i32[B], as in `paged_attention`: the number of positions that are written; None for all of kv_len.
      tree: i32[B, num_queries, 2 + W], as in `paged_attention`: which nodes of a tree the tokens see; None for a chain.
      num_queries: number of the last tokens that are queries; None for all T. Other tokens are keys and values only.
      scale, window, soft_cap: as in `paged_attention`.
      implementation: None (the best known form for these arrays on the platform), "reference" (plain jnp) or "pallas"
        (the kernel where one covers these arrays, else plain jnp).
      platform: "cpu", "gpu", "tpu" or a `Device`, to compile for another platform; None: the default backend.

    Returns:
      [B, num_queries, H * D], the heads' results, and pages, updated. A token whose slot is dropped must be at a
      position that no live query sees.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation or platform.
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

import jax

from pallas_kernels.forms import Op, Where, check_shape, mosaic, plain, streamed, triton

OP = Op("paged_attention", (triton(best=True), mosaic(best=True), streamed(), plain()))

WHOLE_KEYS = 1024  # on GPU, a row's keys need not be split between programs where a block table has room for no more


def paged_attention(
    query: jax.Array,
    pages: jax.Array,
    block_table: jax.Array,
    kv_len: jax.Array,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    platform: Where = None,
) -> jax.Array:
    """Causal attention of the last T tokens of every row to the row's pages.

    Query t of row b stands at position `kv_len[b] - T + t`; it sees the keys at positions j from 0 to its own, and with
    a `window` only those with `j > position - window`. Its own keys must have been written before. Scores are
    `query . key * scale`, with a `soft_cap` `soft_cap * tanh(query . key * scale / soft_cap)`.

    Args:
      query: [B, T, H, D]; query head h reads key-value head `h // (H / G)`.
      pages: [P, S, 2G, D], keys (even index) and values (odd index) interleaved by head.
      block_table: i32[B, N], page ids; entries beyond the pool (unassigned) are read as the last page, so they may only
        stand where no live query looks.
      kv_len: i32[B], positions of the row, T of this pass included. May exceed `N * S` by padded queries.
      num_keys: i32[B], at most kv_len: those of them that are written, the others being padding of this pass; what lies
        there may be anything, also no number. None: all.
      tree: i32[B, T, 2 + W], where the tokens are nodes of a tree and not a chain (see `pallas_kernels.tree`). Of each
        query: the position where it stands, which is then not that of its slot; the position of the slot from which on
        keys are nodes; and 32 of these nodes in each of W words, a bit for each that it sees. It sees all keys before
        them that its window reaches. No window may be shorter than a path of the tree. None: a chain.
      scale: usually `D ** -0.5`.
      window: number of positions that a query sees, its own included; None for all.
      soft_cap: bound on the absolute score; None for none.
      implementation: None (the best known for these arrays there), "reference" (plain jnp) or "pallas" (a kernel where
        there is one for them).
      platform: None (the default backend), "cpu", "gpu", "tpu" or a `Device`; name it when compiling for another.

    Returns:
      [B, T, H, D] in the dtype of `query`, accumulated in float32. Queries at negative positions, and so all of a row
      with `kv_len <= 0`, give zeros; those at positions beyond `N * S` something finite.

    Raises:
      ValueError: shapes that do not fit, a window below 1, an unknown implementation or platform.
    """
    (b, _, h, d), (_, _, g2, _) = query.shape, pages.shape
    check_shape("paged_attention", "pages", pages, *pages.shape[:3], d)
    check_shape("paged_attention", "block_table", block_table, b, *block_table.shape[1:])
    check_shape("paged_attention", "kv_len", kv_len, b)
    if tree is not None:
        check_shape("paged_attention", "tree", tree, *query.shape[:2], *tree.shape[2:])
    if g2 % 2 or h % (g2 // 2):
        raise ValueError(f"paged_attention: {h} query heads do not divide over {g2} / 2 key-value heads")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1 or None, not {window}")
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return OP.run(implementation, platform, query, pages, block_table, kv_len, num_keys, tree, **options)

"""The op paged_attention, which computes causal attention of tokens to the cache pages of their row."""

import jax

from pallas_kernels.forms import DeviceLike, Op, check_shape, mosaic, plain, streamed, triton
from pallas_kernels.pages import AnyPages, ScaledPages

OP = Op("paged_attention", (triton(best=True), mosaic(best=True), streamed(), plain()))

# With up to this many keys, a row is read by one program of the GPU kernel, if enough programs run without splits.
WHOLE_KEYS = 1024


def paged_attention(
    query: jax.Array,
    pages: AnyPages,
    block_table: jax.Array,
    kv_len: jax.Array,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
    platform: DeviceLike = None,
) -> jax.Array:
    """Return causal attention of the last T tokens of every row to the row's pages.

    Query t of row b has position `kv_len[b] - T + t`. It sees the keys at positions j from 0 to its own; with a
    `window`, only the keys with `j > position - window`. Keys and values of the T tokens must already be in the pages.
    Scores are `query . key * scale`; with a `soft_cap`, `soft_cap * tanh(query . key * scale / soft_cap)`.

    Args:
      query: [B, T, H, D], the queries; query head h reads key-value head `h // (H / G)`.
      pages: [P, S, 2G, D], keys (even index) and values (odd index) interleaved by head; a plain array or
        `ScaledPages`.
      block_table: i32[B, N], page ids. Entries of P or more (no page assigned) are read as the last page, so they may
        only cover positions that no query in use sees.
      kv_len: i32[B], number of positions of the row, including the T tokens of this pass. If the T tokens include
        padding, it may exceed `N * S`.
      num_keys: i32[B], number of the row's positions that are written, at most kv_len; None if all are. The other
        positions are padding of this pass, and their slots may hold anything, NaN included.
      tree: i32[B, T, 2 + W] if the tokens are nodes of a tree of drafts (see `tree_mask`); None for a chain. The last
        axis has for each query: its position in the text, which differs from the position of its slot; the position of
        the first slot that holds a node; and W words of 32 bits, with a bit for each node that the query sees. A query
        also sees all keys before the tree's nodes, as far as its window reaches. No window may be shorter than a path
        of the tree.
      scale: factor of the scores, usually `D ** -0.5`.
      window: number of positions that a query sees, including its own; None for all.
      soft_cap: bound on the absolute value of scores; None for no bound.
      implementation: None for the best known implementation on the platform, "reference" for plain jnp, "pallas" for a
        Pallas kernel if one supports these arrays, else plain jnp.
      platform: platform to compile for, "cpu", "gpu", "tpu" or a `Device`; None for JAX's default backend.

    Returns:
      [B, T, H, D] in the dtype of `query`, accumulated in float32. The result of a query at a negative position is 0,
      so a row with `kv_len <= 0` gives zeros. A query at a position beyond `N * S` gives arbitrary finite values.

    Raises:
      ValueError: shapes that do not fit each other, a window below 1, an unknown implementation or platform.
    """
    b, _, h, d = query.shape
    _, _, g2, _ = pages.shape
    stored = pages.values if isinstance(pages, ScaledPages) else pages
    check_shape("paged_attention", "pages", stored, *pages.shape[:3], d)
    check_shape("paged_attention", "block_table", block_table, b, *block_table.shape[1:])
    check_shape("paged_attention", "kv_len", kv_len, b)
    if tree is not None:
        check_shape("paged_attention", "tree", tree, *query.shape[:2], *tree.shape[2:])
    if g2 % 2 or h % (g2 // 2):
        raise ValueError(f"paged_attention: {h} query heads do not divide over {g2} / 2 key-value heads")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1 or None, not {window}")
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    result: jax.Array = OP.run(implementation, platform, query, pages, block_table, kv_len, num_keys, tree, **options)
    return result

"""paged_attention in plain jnp: the production form on CPU."""

import jax.numpy as jnp
from jax import lax


def paged_attention(query, pages, block_table, kv_len, *, scale, window, soft_cap):
    (b, t, h, d), (p, s, g2, _), n = query.shape, pages.shape, block_table.shape[1]
    g = g2 // 2
    num_rows = t * h // g  # rows of a key-value head's products: r = t * (H / G) + head within the group
    products = {
        "precision": lax.Precision.HIGHEST if query.dtype == jnp.float32 else None,
        "preferred_element_type": jnp.float32,
    }

    # Whole pages, not single keys: on CPU the cache is cold, and only long pieces are read ahead.
    kv = jnp.take(pages.reshape(p, s * g2 * d), block_table, axis=0, mode="clip").reshape(b, n * s, g, 2, d)
    key, value = kv[:, :, :, 0].swapaxes(1, 2), kv[:, :, :, 1].swapaxes(1, 2)

    query_at = kv_len[:, None] - t + jnp.arange(num_rows) // (h // g)
    query_at = query_at[:, None, :, None]  # [B, 1, R, 1]
    key_at = jnp.arange(n * s)
    visible = (key_at <= query_at) & (query_at >= 0)
    used = key_at < kv_len[:, None]  # [B, N * S]: some query may see it
    if window is not None:
        visible &= key_at > query_at - window
        used &= key_at > kv_len[:, None] - t - window
    value = jnp.where(used[:, None, :, None], value, 0)  # what nobody sees may be anything, NaN too: 0 * NaN is NaN

    query = query.reshape(b, t, g, h // g, d).swapaxes(1, 2).reshape(b, g, num_rows, d)
    if num_rows == 1:  # a product with one row rounds differently on CPU; results must not depend on T
        query = jnp.concatenate([query, query], axis=2)
    scores = jnp.einsum("bgrd,bgcd->bgrc", query, key, **products) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0))  # all 0 for a query that sees nothing
    # As a product: sums over few and over many elements are compiled differently on CPU, products are not.
    total = jnp.einsum("bgrc,cx->bgrx", weights, jnp.ones((n * s, 2)), **products)[..., :1]
    out = jnp.einsum("bgrc,bgcd->bgrd", weights.astype(value.dtype), value, **products)
    out = (out / jnp.where(total > 0, total, 1))[:, :, :num_rows]
    return out.reshape(b, g, t, h // g, d).swapaxes(1, 2).reshape(b, t, h, d).astype(query.dtype)

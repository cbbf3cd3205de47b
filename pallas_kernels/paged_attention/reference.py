"""The op paged_attention in plain jnp."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pages import AnyPages, ScaledPages
from pallas_kernels.tree_mask import FIRST_NODE, POSITION, sees

# Largest number of keys read at a time, if a page has no more. With their values they stay in a core's cache from
# gather to products.
KEYS = 128


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return einsum(spec, a, b) as float32. If a is float32, compute in full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def score(query: jax.Array, key: jax.Array) -> jax.Array:
    """Return the attention scores f32[B,G,R,C] of query [B,G,R,D] and key [B,C,G,D], before scale and soft cap."""
    return product("bgrd,bcgd->bgrc", query, key)


def paged_attention(
    query: jax.Array,
    pages: AnyPages,
    block_table: jax.Array,
    kv_len: jax.Array,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    score: Callable[[jax.Array, jax.Array], jax.Array] = score,
) -> jax.Array:
    """Compute the op paged_attention in a loop over blocks of keys.

    score: function score(query, key) that computes the scores of a block, as the function `score` of this file does.
    """
    b, t, h, d = query.shape
    p, s, g2, _ = pages.shape
    n = block_table.shape[1]
    g = g2 // 2
    num_rows = t * h // g  # number of query rows of a key-value head; row r = t * (H / G) + index of the query head
    scales = pages.scales.reshape(p, g, 2, s) if isinstance(pages, ScaledPages) else None
    stored = (pages.values if isinstance(pages, ScaledPages) else pages).reshape(p, s, g, 2, d)
    written = jnp.minimum(kv_len if num_keys is None else num_keys, n * s)
    num_pages = min(n, max(1, KEYS // s))  # number of pages that are read at a time
    block_keys = num_pages * s
    table = jnp.pad(block_table, ((0, 0), (0, -n % num_pages)))

    token = jnp.arange(num_rows) // (h // g)
    node = None if tree is None else tree[:, None, token, None]  # [B, 1, R, 1, 2 + W]
    query_at = kv_len[:, None] - t + token if node is None else node[:, 0, :, 0, POSITION]
    query_at = query_at[:, None, :, None]  # [B, 1, R, 1]
    first_at = kv_len - t if tree is None else tree[:, 0, FIRST_NODE]  # lower bound of query positions
    query = query.reshape(b, t, g, h // g, d).swapaxes(1, 2).reshape(b, g, num_rows, d)
    if num_rows == 1:  # on CPU a product with one row rounds differently, but results must not depend on T
        query = jnp.concatenate([query, query], axis=2)

    def attend(
        i: jax.Array | int, before: tuple[jax.Array, jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the softmax state after block i of pages: (largest score, total weight, weighted sum of values).

        Each array is [B, G, R, 1 or D]. before: the state before the block, or None.
        """
        ids = lax.dynamic_slice_in_dim(table, i * num_pages, num_pages, axis=1)
        key, value = (stored.at[ids, :, :, x].get(mode="clip").reshape(b, block_keys, g, d) for x in (0, 1))
        key_at = i * block_keys + jnp.arange(block_keys)
        used = key_at < written[:, None]  # bool[B, keys], whether some query may see the key
        if node is None:
            visible = key_at <= query_at
        else:
            visible = sees([node[..., w] for w in range(2, node.shape[-1])], key_at - node[..., FIRST_NODE])
        if window is not None:
            used &= key_at > first_at[:, None] - window
            visible &= key_at > query_at - window
        value = jnp.where(used[:, :, None, None], value, 0)  # unseen slots may hold NaN, and 0 * NaN is NaN

        if scales is not None:  # scales f32[B, G, 1, keys] multiply scores and weights, not the keys and values
            found = (scales.at[ids, :, x].get(mode="clip").swapaxes(1, 2) for x in (0, 1))
            of_keys, of_values = (x.reshape(b, g, 1, block_keys) for x in found)
            of_values = jnp.where(used[:, None, None], of_values, 0)
            key, value = key.astype(query.dtype), value.astype(query.dtype)
        scores = score(query, key) * scale if scales is None else score(query, key) * (of_keys * scale)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible & used[:, None, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        if before is not None:
            top = jnp.maximum(top, before[0])
        finite = jnp.where(top > -jnp.inf, top, 0)  # a finite value, so that a query that saw no key has weights of 0
        weights = jnp.exp(scores - finite)
        # The weights are summed by a product with ones: on CPU, sums over few and over many elements compile
        # differently, products do not. Both products below are batched over the batch's rows and the heads. In one
        # product of all rows, the library's order of addition would depend on the number of rows (seen with AVX2
        # kernels, which the library uses if the CPU has no AVX-512).
        total = product("bgrc,bgcx->bgrx", weights, jnp.ones((b, g, block_keys, 2)))[..., :1]
        if scales is not None:
            weights = weights * of_values
        out = product("bgrc,bcgd->bgrd", weights.astype(value.dtype), value)
        if before is None:
            return top, total, out
        shrink = jnp.exp(before[0] - finite)
        return top, before[1] * shrink + total, before[2] * shrink + out

    if num_pages == n:
        _, total, out = attend(0)
    else:  # a loop from the first block that some query sees to the last
        # The zeros depend on the query. Else XLA on a GPU would create the zeros of all layers at the program's start.
        query, zero = lax.optimization_barrier((query, jnp.float32(0)))
        sums = [jnp.full((b, g, query.shape[2], width), zero) for width in (1, 1, d)]
        begin = 0 if window is None else jnp.min(jnp.maximum(first_at - window + 1, 0)) // block_keys
        end = jnp.minimum(-(-jnp.max(kv_len) // block_keys), table.shape[1] // num_pages)
        _, total, out = lax.fori_loop(begin, end, attend, (sums[0] - jnp.inf, *sums[1:]))
    out = (out / jnp.where(total > 0, total, 1))[:, :, :num_rows]
    return out.reshape(b, g, t, h // g, d).swapaxes(1, 2).reshape(b, t, h, d).astype(query.dtype)

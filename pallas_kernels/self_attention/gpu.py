"""The op self_attention on GPU: the qkv product, followed by one or two kernels.

For a single token one kernel follows (see one_token.py), unless the product would have too many partial sums. One
kernel also follows for rows of few tokens if one program reads all keys of a row (see `whole_rows.covers`). Otherwise
two kernels follow: that of attention_heads.py, and attention over pages.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _few_rows, _tiling
from pallas_kernels.device import Device
from pallas_kernels.forms import call
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import gpu as paged_attention
from pallas_kernels.pages import AnyPages, ScaledPages
from pallas_kernels.plain import rms_norm
from pallas_kernels.self_attention import one_token, whole_rows
from pallas_kernels.self_attention.attention_heads import heads
from pallas_kernels.weights import AnyWeight, Prepared, product
from pallas_kernels.weights.interleaved import Interleaved
from pallas_kernels.weights.interleaved_grouped import InterleavedGrouped
from pallas_kernels.weights.scaled import Scaled

READS = (Scaled.form, Interleaved.form, InterleavedGrouped.form)


def fits(
    x: jax.Array,
    norm: jax.Array | None,
    normed: jax.Array | None,
    qkv: AnyWeight,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    pages: AnyPages,
    slots: jax.Array,
    block_table: jax.Array,
    kv_len: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    next_out: jax.Array | None = None,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    query_factor: jax.Array | None = None,
    *_: Any,
    device: Device,
    **options: Any,
) -> bool:
    """Return whether the kernels support these arguments."""
    d, head_dim = pages.shape[3], 2 * cos.shape[-1]
    if query_factor is not None or (q_norm is not None and q_norm.ndim > 1):
        return False
    unpadded = d == head_dim >= 32 and d & (d - 1) == 0
    scaled = isinstance(pages, ScaledPages) and paged_attention.fits(x, pages, device=device)
    stored = scaled or pages.dtype == jnp.bfloat16
    return unpadded and x.dtype == jnp.bfloat16 and stored and not options.get("v_norm")


def self_attention(
    x: jax.Array,
    norm: Any,  # scale of the norm, or None if `normed` is given
    normed: jax.Array | None,
    qkv: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    pages: Any,
    slots: jax.Array,
    block_table: jax.Array,
    kv_len: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    next_out: jax.Array | None = None,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    query_factor: None = None,
    *,
    num_queries: int,
    eps: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sum_over: tuple[str, ...] = (),
    device: Device,
) -> tuple[Any, AnyPages]:
    """Compute the op self_attention with the kernels that suit these arguments."""
    b, t, _ = x.shape
    d = pages.shape[3]
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "device": device}
    few = _tiling.covers(b * t, qkv, device=device)
    scaled = isinstance(pages, ScaledPages)
    summed = next_out is not None and _few_rows.sums_for(next_out, b * num_queries, device)
    if b * t == 1 and not scaled and not (few and one_token.has_too_many_parts(qkv)):
        arrays = x, norm, normed, qkv, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin
        return one_token.self_attention(*arrays, eps=eps, summed=summed, **options)
    normed = rms_norm(norm, x, eps) if normed is None else normed
    normed = jax.tree.map(lambda array: array.reshape(b * t, -1), normed)
    if few:
        parts = _few_rows.product(normed, qkv, device=device)
    else:
        parts = product(normed, qkv, device=device)[None]
    cos, sin = (table.reshape(b * t, -1) for table in (cos, sin))
    if tree is None and num_queries == t and not scaled and whole_rows.covers(t, parts, pages, block_table, device):
        mixed, pages = whole_rows.attention(
            parts, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin, eps=eps, then=next_out, **options
        )
        return mixed.reshape(b, t, -1), pages
    # Keys and values for pages in 8 bits are first written to an array of their own.
    into = jnp.zeros((b * t, 1, *pages.shape[2:]), x.dtype) if scaled else pages
    where = jnp.arange(b * t, dtype=jnp.int32) if scaled else slots
    queries, written = heads(parts, bias, q_norm, k_norm, into, where, cos, sin, eps=eps, device=device)
    pages = kv_write(pages, written[:, 0], slots, platform=device) if scaled else written
    mixed = queries = queries.reshape(b, t, -1, d)[:, t - num_queries :]
    if num_queries:
        arguments = queries, pages, block_table, kv_len, num_keys, tree
        mixed = call("paged_attention", "gpu", *arguments, summed=summed, **options)
        if isinstance(mixed, Prepared):
            return mixed, pages
    return mixed.reshape(b, num_queries, queries.shape[2] * d), pages

"""The op self_attention, composed of plain jnp and the ops kv_write and paged_attention."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages import AnyPages
from pallas_kernels.plain import grown, project, rms_norm
from pallas_kernels.weights import AnyWeight, product


def self_attention(
    x: jax.Array,
    norm: Any,  # scale of the norm, or None if `normed` is given
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
    next_out: AnyWeight | None = None,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    query_factor: jax.Array | None = None,
    *,
    num_queries: int,
    eps: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sum_over: tuple[str, ...] = (),
    v_norm: bool = False,
    device: Device | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, AnyPages]:
    """Compute the op self_attention: norm, qkv product, norms of heads, rotary embedding, cache write and attention."""
    chosen: dict[str, Any] = {"platform": device, "implementation": implementation}
    b, t, _ = x.shape
    g = pages.shape[2] // 2
    d = 2 * cos.shape[-1]
    normed = rms_norm(norm, x, eps) if normed is None else normed
    heads = product(normed, qkv, device=device)
    query, key, value = project(heads, bias, q_norm, k_norm, cos, sin, g, eps, device, sum_over=sum_over, v_norm=v_norm)
    query = grown(query, query_factor)
    kv = jnp.stack([key, value], axis=3).reshape(b, t, 2 * g, d)
    if extra := pages.shape[-1] - d:  # the layout of pages may pad the head size for a kernel
        query, kv = (jnp.pad(part, ((0, 0),) * 3 + ((0, extra),)) for part in (query, kv))
    pages = kv_write(pages, kv.reshape(b * t, *kv.shape[2:]), slots, **chosen)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, **chosen}
    query = query[:, t - num_queries :]
    mixed = paged_attention(query, pages, block_table, kv_len, num_keys, tree, **options) if num_queries else query
    return mixed[..., :d].reshape(b, num_queries, query.shape[2] * d), pages

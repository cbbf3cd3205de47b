"""self_attention as its parts: norm and product, norms of the heads, rotary embedding, cache write, attention."""

import jax.numpy as jnp

from pallas_kernels.feed_forward.reference import linear, rms_norm, whole
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention


def self_attention(
    x, norm, normed, qkv, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin,
    next_out=None, num_keys=None, *, eps, scale, window, soft_cap, platform=None, linear=linear,
):  # fmt: skip
    (b, t, _), g, d = x.shape, pages.shape[2] // 2, 2 * cos.shape[-1]
    normed = rms_norm(norm, x, eps) if normed is None else normed
    query, key, value = project(normed, qkv, bias, q_norm, k_norm, cos, sin, g, eps, platform, linear)
    kv = jnp.stack([key, value], axis=3).reshape(b, t, 2 * g, d)
    if extra := pages.shape[-1] - d:  # the layout may pad the head size for its kernels
        query, kv = (jnp.pad(part, ((0, 0),) * 3 + ((0, extra),)) for part in (query, kv))
    pages = kv_write(pages, kv.reshape(b * t, *kv.shape[2:]), slots, platform=platform)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "platform": platform}
    mixed = paged_attention(query, pages, block_table, kv_len, num_keys, **options)
    return mixed[..., :d].reshape(b, t, -1), pages


def project(normed, qkv, bias, q_norm, k_norm, cos, sin, groups, eps, platform=None, linear=linear):
    """-> query [B,T,H,D], key and value [B,T,G,D], G = groups."""
    (b, t, _), d = normed.shape, 2 * cos.shape[-1]
    heads = linear(qkv, normed)
    if bias is not None:
        heads = heads + bias
    heads = whole(heads, platform).reshape(b, t, groups, -1, d)
    query = heads[:, :, :, :-2].reshape(b, t, -1, d)
    key, value = heads[:, :, :, -2], heads[:, :, :, -1]
    if q_norm is not None:
        query, key = rms_norm(q_norm, query, eps), rms_norm(k_norm, key, eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def rotate(x, cos, sin):
    """x [B,T,heads,D]: halves are rotated against each other."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)

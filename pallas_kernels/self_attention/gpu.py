"""self_attention on GPU: the product qkv, then one or two kernels.

One kernel follows for a single token (see one_token.py), unless its product would have too many parts. One kernel also
follows for some rows with few keys (see whole_rows.py). Otherwise two follow: heads.py, and attention over pages.
"""

import jax.numpy as jnp

from pallas_kernels import _few_rows
from pallas_kernels.device import Device
from pallas_kernels.forms import call
from pallas_kernels.plain import rms_norm
from pallas_kernels.self_attention import one_token, whole_rows
from pallas_kernels.self_attention.attention_heads import heads
from pallas_kernels.weights import product

READS: tuple[str, ...] = ()


def fits(
    x, norm, normed, qkv, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, *_,
    device: Device, **options,
) -> bool:  # fmt: skip
    """Return whether the kernels cover these arguments."""
    d, head_dim = pages.shape[3], 2 * cos.shape[-1]
    unpadded = d == head_dim >= 32 and d & (d - 1) == 0
    return unpadded and x.dtype == pages.dtype == jnp.bfloat16


def self_attention(
    x, norm, normed, qkv, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin,
    next_out=None, num_keys=None, tree=None, *, num_queries, eps, scale, window, soft_cap, device,
):  # fmt: skip
    b, t, e = x.shape
    d = pages.shape[3]
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "device": device}
    few = _few_rows.covers(b * t, qkv, device=device)
    if b * t == 1 and not (few and one_token.has_too_many_parts(qkv)):
        arrays = x, norm, normed, qkv, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin
        return one_token.self_attention(*arrays, eps=eps, **options)
    normed = (rms_norm(norm, x, eps) if normed is None else normed).reshape(b * t, e)
    if few:
        parts = _few_rows.product(normed, qkv, device=device)
    else:
        parts = product(normed, qkv, device=device)[None]
    cos, sin = (table.reshape(b * t, -1) for table in (cos, sin))
    if tree is None and num_queries == t and whole_rows.covers(t, parts, pages, block_table, device):
        mixed, pages = whole_rows.attention(
            parts, bias, q_norm, k_norm, pages, slots, block_table, kv_len, cos, sin, eps=eps, then=next_out, **options
        )
        return mixed.reshape(b, t, -1), pages
    queries, pages = heads(parts, bias, q_norm, k_norm, pages, slots, cos, sin, eps=eps, device=device)
    mixed = queries = queries.reshape(b, t, -1, d)[:, t - num_queries :]
    if num_queries:
        mixed = call("paged_attention", "gpu", queries, pages, block_table, kv_len, num_keys, tree, **options)
    return mixed.reshape(b, num_queries, queries.shape[2] * d), pages

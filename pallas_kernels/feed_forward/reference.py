"""The op feed_forward in plain jnp."""

from typing import Any

import jax

from pallas_kernels.device import Device
from pallas_kernels.plain import activate, rms_norm, total, whole
from pallas_kernels.weights import AnyWeight, product


def feed_forward(
    x: jax.Array,
    mixed: jax.Array,
    out: AnyWeight,
    norm: jax.Array | None,
    gate_up: AnyWeight,
    down: AnyWeight,
    post_attention_norm: jax.Array | None,
    post_mlp_norm: jax.Array | None,
    next_norm: jax.Array | None,
    next_qkv: AnyWeight | None = None,
    mailbox: Any = None,
    *,
    eps: float,
    activation: str,
    block: int,
    sum_over: tuple[str, ...] = (),
    post_eps: float | None = None,
    device: Device | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the op feed_forward in plain jnp. The second result is None: the next op computes its own norm.

    mailbox: not used, the compiler sums over devices.
    """
    post_eps = eps if post_eps is None else post_eps
    mixed = total(product(mixed, out, device=device), sum_over)
    if post_attention_norm is not None:
        mixed = rms_norm(post_attention_norm, mixed, post_eps)
    x = x + mixed
    normed = x if norm is None else rms_norm(norm, x, eps)
    both = whole(product(normed, gate_up, device=device), device)
    both = both.reshape(*x.shape[:-1], -1, 2, block)
    hidden = activate(activation, both[..., 0, :]) * both[..., 1, :]
    hidden = total(product(hidden.reshape(*x.shape[:-1], -1), down, device=device), sum_over)
    if post_mlp_norm is not None:
        hidden = rms_norm(post_mlp_norm, hidden, post_eps)
    return x + hidden, None

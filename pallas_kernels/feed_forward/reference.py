"""feed_forward in plain jnp."""

from pallas_kernels.plain import activate, rms_norm, total, whole
from pallas_kernels.weights import product


def feed_forward(
    x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv=None, *,
    eps, activation, block, sum_over=(), device=None,
):  # fmt: skip
    mixed = total(product(mixed, out, device=device), sum_over)
    if post_attention_norm is not None:
        mixed = rms_norm(post_attention_norm, mixed, eps)
    x = x + mixed
    both = whole(product(rms_norm(norm, x, eps), gate_up, device=device), device)
    both = both.reshape(*x.shape[:-1], -1, 2, block)
    hidden = activate(activation, both[..., 0, :]) * both[..., 1, :]
    hidden = total(product(hidden.reshape(*x.shape[:-1], -1), down, device=device), sum_over)
    if post_mlp_norm is not None:
        hidden = rms_norm(post_mlp_norm, hidden, eps)
    return x + hidden, None

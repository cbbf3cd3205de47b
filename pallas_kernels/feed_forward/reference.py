"""feed_forward in plain jnp."""

from pallas_kernels.plain import activate, linear, rms_norm, total, whole


def feed_forward(
    x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv=None, *,
    eps, activation, block, sum_over=(), device=None, linear=linear,
):  # fmt: skip
    mixed = total(linear(out, mixed), sum_over)
    if post_attention_norm is not None:
        mixed = rms_norm(post_attention_norm, mixed, eps)
    x = x + mixed
    both = whole(linear(gate_up, rms_norm(norm, x, eps)), device)
    both = both.reshape(*x.shape[:-1], -1, 2, block)
    hidden = activate(activation, both[..., 0, :]) * both[..., 1, :]
    hidden = total(linear(down, hidden.reshape(*x.shape[:-1], -1)), sum_over)
    if post_mlp_norm is not None:
        hidden = rms_norm(post_mlp_norm, hidden, eps)
    return x + hidden, None

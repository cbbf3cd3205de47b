"""feed_forward in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax


def linear(weights, x):
    """x [..., I] times weights [I, O] -> [..., O], in full precision where the numbers are float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, weights, numbers, precision=precision, preferred_element_type=x.dtype)


def whole(product, platform):
    """A product whose columns are about to be split into groups.

    The TPU compiler must not see that: of a pass over one token a row it makes a convolution over the groups, which
    wants the weights transposed, so that each pass copies them.
    """
    return lax.optimization_barrier(product) if platform == "tpu" else product


def feed_forward(
    x, mixed, out, norm, gate_up, down, post_attention_norm, post_mlp_norm, next_norm, next_qkv=None, *,
    eps, activation, block, platform=None, linear=linear,
):  # fmt: skip
    mixed = linear(out, mixed)
    if post_attention_norm is not None:
        mixed = rms_norm(post_attention_norm, mixed, eps)
    x = x + mixed
    both = whole(linear(gate_up, rms_norm(norm, x, eps)), platform)
    both = both.reshape(*x.shape[:-1], -1, 2, block)
    hidden = activate(activation, both[..., 0, :]) * both[..., 1, :]
    hidden = linear(down, hidden.reshape(*x.shape[:-1], -1))
    if post_mlp_norm is not None:
        hidden = rms_norm(post_mlp_norm, hidden, eps)
    return x + hidden, None


def rms_norm(scale, x, eps):
    """x / rms(x) * scale over the last axis, in float32."""
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.astype(jnp.float32)).astype(x.dtype)


def activate(kind, x):
    return jax.nn.gelu(x, approximate=True) if kind == "gelu_tanh" else jax.nn.silu(x)

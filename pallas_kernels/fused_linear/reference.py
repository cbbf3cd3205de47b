"""fused_linear in plain jnp: the norm, the product, what is added."""

import jax
import jax.numpy as jnp
from jax import lax


def fused_linear(x, weights, norm, bias, residual, *, eps, activation, block):
    if norm is not None:
        x = rms_norm(norm, x, eps)
    y = linear(weights, x)
    if bias is not None:
        y = y + bias
    if activation is not None:
        both = y.reshape(*y.shape[:-1], -1, 2, block)
        y = activate(activation, both[..., 0, :]) * both[..., 1, :]
        y = y.reshape(*x.shape[:-1], -1)
    return y if residual is None else residual + y


def linear(weights, x):
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, weights, numbers, precision=precision, preferred_element_type=x.dtype)


def rms_norm(scale, x, eps):
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.astype(jnp.float32)).astype(x.dtype)


def activate(kind, x):
    return jax.nn.gelu(x, approximate=True) if kind == "gelu_tanh" else jax.nn.silu(x)

"""The parts of a decoder layer in plain jnp, from which ops and models are built."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.device import Device

FEW = 8  # number of rows to which a single row is padded


def dot(x: jax.Array, matrix: jax.Array, axis: int, dtype: DTypeLike) -> jax.Array:
    """Multiply x [..., I] with a matrix. Return [..., O] in `dtype`. axis: the matrix axis that is summed over."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, matrix, dimensions, precision=matmul_precision(x.dtype), preferred_element_type=dtype)


def matmul_precision(dtype: DTypeLike) -> lax.Precision:
    """Return the precision of matrix products of a dtype: full for float32, even if JAX's default uses fewer bits."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def as_few_rows(matmul: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return matmul(x), [..., O] for x [..., I]. Pad a single row of x with rows of zeros for the product.

    On GPU, XLA would turn a product with a single row into a slow reduction.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > 1:
        return matmul(x)
    return matmul(jnp.pad(rows, ((0, FEW - 1), (0, 0))))[:1].reshape(*x.shape[:-1], -1)


def whole(product: jax.Array, device: Device | None) -> jax.Array:
    """Return a product unchanged, but hide from the TPU compiler that the caller splits its columns into groups.

    For a pass over one token of each row, the compiler would turn the product and the split into a convolution over the
    groups. A convolution needs the weights transposed, so each pass would copy them.
    """
    if device is None or device.platform != "tpu":
        return product
    hidden: jax.Array = lax.optimization_barrier(product)
    return hidden


def total(product: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum of devices' partial products over these mesh axes; the product itself if `axes` is empty."""
    summed: jax.Array = lax.psum(product, axes) if axes else product
    return summed


def rms_norm(scale: jax.Array | None, x: jax.Array, eps: float) -> jax.Array:
    """Return the RMSNorm x / rms(x) * scale over the last axis, computed in float32, in the dtype of x.

    scale: scale of each element; None for 1.
    """
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h if scale is None else h * scale.astype(jnp.float32)).astype(x.dtype)


def activate(kind: str, x: jax.Array) -> jax.Array:
    """Apply an activation function to x. kind: "silu" or "gelu_tanh"."""
    return jax.nn.gelu(x, approximate=True) if kind == "gelu_tanh" else jax.nn.silu(x)


def project(
    heads: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    groups: int,
    eps: float,
    device: Device | None = None,
    *,
    sum_over: tuple[str, ...] = (),
    v_norm: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a product with merged qkv weights by head, add the bias, norm queries and keys, and rotate both.

    Return query [B,T,H,D], key [B,T,G,D] and value [B,T,G,D], where G = groups.

    heads: [B,T,_], the product, grouped by key-value head: its queries, its key, its value.
    bias: bias of the product, or None.
    q_norm, k_norm: scales of RMSNorms of queries and keys (`norm_heads`), or None.
    cos, sin: f32[B,T,D/2], cosine and sine of the rotary angles.
    groups: number of key-value heads.
    sum_over: mesh axes over which heads are sharded.
    v_norm: whether an RMSNorm without a scale is applied to each head of the values.
    """
    b, t, _ = heads.shape
    d = 2 * cos.shape[-1]
    if bias is not None:
        heads = heads + bias
    heads = whole(heads, device).reshape(b, t, groups, -1, d)
    query = heads[:, :, :, :-2].reshape(b, t, -1, d)
    key, value = heads[:, :, :, -2], heads[:, :, :, -1]
    if q_norm is not None and k_norm is not None:
        query, key = norm_heads(q_norm, query, eps, sum_over), norm_heads(k_norm, key, eps, sum_over)
    if v_norm:
        value = rms_norm(None, value, eps)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def project_queries(
    heads: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    num_heads: int,
    eps: float,
) -> jax.Array:
    """Split a product [B,T,H*D] of queries alone by head, and add bias, norm and rotation as `project` does.

    Return query [B,T,H,D], where H = num_heads.
    """
    heads = heads if bias is None else heads + bias
    query = heads.reshape(*heads.shape[:2], num_heads, -1)
    return rotate(query if q_norm is None else norm_heads(q_norm, query, eps), cos, sin)


def norm_heads(scale: jax.Array, heads: jax.Array, eps: float, sum_over: tuple[str, ...] = ()) -> jax.Array:
    """Return the RMSNorm of heads [..., H, D]: of each head for a scale f32[D], of all together for a scale f32[H, D].

    sum_over: mesh axes over which the heads are sharded.
    """
    if scale.ndim == 1:
        return rms_norm(scale, heads, eps)
    h = heads.astype(jnp.float32)
    square = jnp.mean(h * h, axis=(-2, -1), keepdims=True)
    if sum_over:
        square = lax.pmean(square, sum_over)
    return (h * lax.rsqrt(square + eps) * scale.astype(jnp.float32)).astype(heads.dtype)


def grown(query: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Return queries [B,T,H,D] times each token's factor f32[B,T]; None for 1."""
    return query if factor is None else (query * factor[:, :, None, None]).astype(query.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply the rotary embedding to x [B,T,heads,D]: rotate the two halves of each head against each other."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def argmax(x: jax.Array) -> jax.Array:
    """Return jnp.argmax of x [..., V] over the last axis, in int32.

    On CPU the argmax is computed by two reductions (0.11 ms for 5 x 49,152 elements), because XLA's argmax compares one
    element at a time there (0.69 ms). For a row with NaN, they return V - 1.
    """

    def first_of_the_largest(x: jax.Array) -> jax.Array:
        ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, x.shape[-1] - 1), axis=-1)

    def by_index(x: jax.Array) -> jax.Array:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    ids: jax.Array = lax.platform_dependent(x, cpu=first_of_the_largest, default=by_index)
    return ids

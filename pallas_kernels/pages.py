"""The forms in which memory holds the pages of a KV cache: a plain array, or 8-bit values with scales."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import weights

LARGEST = weights.LARGEST | {"float8_e5m2": 57344.0}  # largest absolute value, by dtype
LEAST = 1e-30  # lower bound of the largest absolute value of an entry, so that no scale is 0 or subnormal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledPages:
    """Pages of keys and values in 8 bits, with a scale for each key and each value.

    values: [P, S, 2G, D], int8 or an 8-bit float, keys (even index) and values (odd index) interleaved by head.
    scales: f32[P, 1, 2G * S], for G key-value heads and S slots a page. The scale of head h of values[p, s] is
      scales[p, 0, h * S + s]. So a TPU kernel copies a page's scales as one row, without padding, and sharding by heads
      never splits a head's scales.
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [P, S, 2G, D] of the values."""
        shape: tuple[int, ...] = self.values.shape
        return shape

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def by_head(self) -> jax.Array:
        """Return the scales as an array f32[P, 2G, S]."""
        p, s, g2, _ = self.shape
        scales: jax.Array = self.scales.reshape(p, g2, s)
        return scales


AnyPages = jax.Array | ScaledPages


class ScaledEntries(NamedTuple):
    """Keys and values of M tokens, rounded to 8 bits: values [M, 2G, D] and scales f32[M, 2G]."""

    values: jax.Array
    scales: jax.Array


AnyEntries = jax.Array | ScaledEntries


def zeros(num_pages: int, page_size: int, heads: int, head_dim: int, dtype: Any) -> AnyPages:
    """Return pages of zeros [P, S, heads, D]. A dtype of 8 bits gives `ScaledPages`."""
    values = jnp.zeros((num_pages, page_size, heads, head_dim), dtype)
    if jnp.dtype(dtype).name not in LARGEST:
        return values
    return ScaledPages(values, jnp.zeros((num_pages, 1, heads * page_size), jnp.float32))


def specs(pages: AnyPages, spec: P) -> Any:
    """Return the partition spec of each array of pages. spec: the partition spec of the axes [P, S, 2G, D]."""
    return ScaledPages(spec, P(None, None, spec[2])) if isinstance(pages, ScaledPages) else spec


def quantised(kv: jax.Array, dtype: Any) -> ScaledEntries:
    """Round keys and values [M, 2G, D] to a dtype of 8 bits. The result of an entry depends on that entry alone.

    The scale of an entry that is not finite is not finite either, so that attention shows the fault.
    """
    x = kv.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), LEAST) / LARGEST[jnp.dtype(dtype).name]
    x = x / scales[..., None]
    return ScaledEntries((jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scales)


def entries(pages: AnyPages, slots: jax.Array) -> AnyEntries:
    """Return the keys and values in the slots i32[M], as they are stored: [M, 2G, D], or `ScaledEntries`."""
    values = pages.values if isinstance(pages, ScaledPages) else pages
    found = jnp.take(values.reshape(-1, *values.shape[2:]), slots, axis=0, mode="clip")
    if not isinstance(pages, ScaledPages):
        return found
    # First whole rows of the pages' scales: a gather by head would make XLA transpose the scales of all pages.
    size, heads = pages.shape[1:3]
    rows = jnp.take(pages.scales, slots // size, axis=0, mode="clip").reshape(-1, heads, size)
    return ScaledEntries(found, jnp.take_along_axis(rows, (slots % size)[:, None, None], axis=2)[:, :, 0])

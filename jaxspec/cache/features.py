"""Features: hidden states of the target that a drafter reads, stored in pages like the target's keys and values.

The features of a position are at the same page and slot as its keys and values.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.parallel.placement import Placement


def write(cache: PagedKVCache, slots: Int[Array, " _"], features: Float[Array, "B T M"]) -> tuple[Array, ...]:
    """Write features to slots i32[B*T] and return a tuple of the feature pages. Do not write slots outside the pool."""
    (pages,) = cache.features
    rows = pages.reshape(-1, pages.shape[-1])
    values = features.reshape(-1, features.shape[-1]).astype(pages.dtype)
    return (rows.at[slots].set(values, mode="drop").reshape(pages.shape),)


def read(
    cache: PagedKVCache,
    positions: Int[Array, "B T"],
    block_table: Int[Array, "B N"],
    placement: Placement | None = None,
) -> Float[Array, "B T M"]:
    """Return the features of these positions of each row. For a position without a page the values are arbitrary.

    placement: placement on whose devices the result is replicated; with None it is sharded like the pages.
    """
    (pages,) = cache.features
    page_size, width = pages.shape[1:]
    page = jnp.take_along_axis(block_table, jnp.clip(positions, 0) // page_size, axis=1, mode="clip")
    slots = page * page_size + positions % page_size
    found = jnp.take(pages.reshape(-1, width), slots, axis=0, mode="clip")
    if placement is None or placement.alone:
        return found
    # Gather the features from all devices here. Otherwise the compiler would shard all that is computed from them.
    result: Float[Array, "B T M"] = lax.with_sharding_constraint(found, placement.sharding())
    return result

"""Lookup of the rows of an embedding table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.models.backend import Backend
from jaxspec.parallel.placement import per_shard


def looked_up(table: Float[Array, "V E"], ids: Int[Array, "*n"], backend: Backend) -> Float[Array, "*n E"]:
    """Return the rows of a possibly sharded table for these ids. An id beyond the table gets the table's last row.

    If the table is sharded, each device looks into its own part. The compiler alone would gather the whole table on
    each device even for a single id: 1.2 GB for Qwen3-8B in every pass over one row.
    """
    if backend.alone and backend.device.platform == "cpu" and table.dtype == jnp.bfloat16:

        def row(i: jax.Array) -> jax.Array:
            result: jax.Array = lax.dynamic_index_in_dim(table, i, 0, keepdims=False).astype(jnp.float32)
            return result

        # Rows are read one by one. Otherwise the compiler would convert the whole table to float32 for a single id.
        found: Float[Array, "*n E"] = lax.map(row, jnp.clip(ids, 0).reshape(-1)).reshape(*ids.shape, -1)
        return found
    rows = table.shape[0]
    placement = backend.vocab_placement(rows)
    if placement is None:
        return take(table, ids)
    axes = placement.axes
    part = rows // placement.degree

    def own(table: jax.Array, ids: jax.Array) -> jax.Array:
        at = jnp.clip(ids, 0, rows - 1) - lax.axis_index(axes) * part
        here = (at >= 0) & (at < part)
        result: jax.Array = lax.psum(jnp.where(here[..., None], take(table, at), 0), axes)
        return result

    result: Float[Array, "*n E"] = per_shard(own, placement, (P(axes, None), P()), P())(table, ids)
    return result


def take(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows of a table for these ids. An id beyond the table gets the table's last row.

    A draft with fewer ids than the target may read an id that it lacks. JAX's default mode "fill" would return NaN.
    """
    return jnp.take(table, ids, axis=0, mode="clip")

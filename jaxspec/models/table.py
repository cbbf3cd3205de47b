"""From ids to the rows of a table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.models.backend import Backend
from jaxspec.parallel.placement import per_shard


def looked_up(table: Float[Array, "V E"], ids: Int[Array, "*n"], backend: Backend) -> Float[Array, "*n E"]:
    """The rows of these ids; of an id beyond the table its last row. On several devices each looks into its own part.

    The compiler by itself would, for a single id, first bring the whole table together on each device: of Qwen3-8B
    1.2 GB in every pass over one row.
    """
    if backend.alone and backend.device.platform == "cpu" and table.dtype == jnp.bfloat16:
        # Row by row: the compiler would first widen the whole table for a single id.
        row = lambda i: lax.dynamic_index_in_dim(table, i, 0, keepdims=False).astype(jnp.float32)
        return lax.map(row, jnp.clip(ids, 0).reshape(-1)).reshape(*ids.shape, -1)
    # clip: a draft with fewer ids than the target may be shown one it lacks, and the default would make it NaN.
    take = lambda table, ids: jnp.take(table, ids, axis=0, mode="clip")
    rows = table.shape[0]
    if (placement := backend.in_parts(rows)) is None:
        return take(table, ids)
    axes, part = placement.axes, rows // placement.degree

    def own(table: jax.Array, ids: jax.Array) -> jax.Array:
        at = jnp.clip(ids, 0, rows - 1) - lax.axis_index(axes) * part
        here = (at >= 0) & (at < part)
        return lax.psum(jnp.where(here[..., None], take(table, at), 0), axes)

    return per_shard(own, placement, (P(axes, None), P()), P())(table, ids)

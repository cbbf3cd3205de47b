"""The op slot_mapping on TPU: scalar loops over arrays in SMEM, which must have room for the block table."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._types import Ref
from pallas_kernels.device import Device


def slot_mapping(
    positions: jax.Array,
    rejected: jax.Array,
    query_start: jax.Array,
    block_table: jax.Array,
    *,
    page_size: int,
    max_model_len: int,
    pad_slot: int,
    device: Device,
) -> jax.Array:
    """Compute the slots in one kernel that loops over the rows of the batch, and over the elements of each row."""
    options = {"page_size": page_size, "max_model_len": max_model_len, "pad_slot": pad_slot}
    smem = pl.BlockSpec(memory_space=pltpu.MemorySpace.SMEM)
    # The block table is passed flat, because SMEM pads each row to a multiple of 128 elements.
    result: jax.Array = pl.pallas_call(
        functools.partial(_kernel, num_pages_row=block_table.shape[1], **options),
        in_specs=[smem] * 4,
        out_specs=smem,
        out_shape=jax.ShapeDtypeStruct(positions.shape, jnp.int32),
        interpret=device.interpret,
        name="slot_mapping",
    )(positions, rejected.astype(jnp.int32), query_start, block_table.reshape(-1))
    return result


def _kernel(
    positions: Ref,
    rejected: Ref,
    query_start: Ref,
    block_table: Ref,
    slots: Ref,
    *,
    num_pages_row: int,
    page_size: int,
    max_model_len: int,
    pad_slot: int,
) -> None:
    limit = min(max_model_len, num_pages_row * page_size)

    def each(start: jax.Array | int, end: jax.Array | int, body: Callable[[jax.Array], None]) -> None:
        lax.fori_loop(start, end, lambda i, _: body(i), None)

    def pad(i: jax.Array) -> None:
        slots[i] = jnp.int32(pad_slot)

    def map_row(b: jax.Array) -> None:
        def map_element(i: jax.Array) -> None:
            position = positions[i]
            live = (rejected[i] == 0) & (position >= 0) & (position < limit)
            position = jnp.where(live, position, 0)
            page = block_table[b * num_pages_row + position // page_size]
            live &= page < pad_slot // page_size
            slots[i] = jnp.where(live, page * page_size + position % page_size, pad_slot)

        each(query_start[b] + b, query_start[b + 1] + b + 1, map_element)

    num_rows = query_start.shape[0] - 1
    each(0, num_rows, map_row)
    each(query_start[num_rows] + num_rows, slots.shape[0], pad)

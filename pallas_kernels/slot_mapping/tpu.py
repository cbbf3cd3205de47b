"""slot_mapping on TPU: scalar loops over SMEM, which must hold the block table."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def slot_mapping(positions, rejected, query_start, block_table, *, page_size, max_model_len, pad_slot, device):
    options = {"page_size": page_size, "max_model_len": max_model_len, "pad_slot": pad_slot}
    smem = pl.BlockSpec(memory_space=pltpu.MemorySpace.SMEM)
    return pl.pallas_call(
        functools.partial(_kernel, num_pages_row=block_table.shape[1], **options),
        in_specs=[smem] * 4,
        out_specs=smem,
        out_shape=jax.ShapeDtypeStruct(positions.shape, jnp.int32),
        interpret=device.interpret,
        name="slot_mapping",
    )(positions, rejected.astype(jnp.int32), query_start, block_table.reshape(-1))  # flat: SMEM pads rows to 128


def _kernel(positions, rejected, query_start, block_table, slots, *, num_pages_row, page_size, max_model_len, pad_slot):
    limit = min(max_model_len, num_pages_row * page_size)

    def each(start, end, body):
        lax.fori_loop(start, end, lambda i, _: body(i), None)

    def pad(i):
        slots[i] = jnp.int32(pad_slot)

    def map_row(b):
        def map_element(i):
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

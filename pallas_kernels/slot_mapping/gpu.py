"""slot_mapping on GPU. Every program finds the rows of one block of elements, then reads the block table."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BLOCK = 128


def slot_mapping(positions, rejected, query_start, block_table, *, page_size, max_model_len, pad_slot, device):
    options = {"page_size": page_size, "max_model_len": max_model_len, "pad_slot": pad_slot}
    return pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(pl.cdiv(positions.shape[0], BLOCK),),
        out_shape=jax.ShapeDtypeStruct(positions.shape, jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret,
        name="slot_mapping",
    )(positions, rejected.astype(jnp.int32), query_start, block_table)


def _kernel(positions, rejected, query_start, block_table, slots, *, page_size, max_model_len, pad_slot):
    b, n = block_table.shape
    i = pl.program_id(0) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    here = i < slots.shape[0]

    def count(r, row):
        return row + (i > query_start[r + 1] + r).astype(jnp.int32)

    row = lax.fori_loop(0, b, count, jnp.zeros(BLOCK, jnp.int32))
    position = plgpu.load(positions.at[i], mask=here, other=-1)
    live = plgpu.load(rejected.at[i], mask=here, other=1) == 0
    live &= (row < b) & (position >= 0) & (position < min(max_model_len, n * page_size))
    row, position = jnp.where(live, row, 0), jnp.where(live, position, 0)

    page = plgpu.load(block_table.at[row, position // page_size])
    live &= page < pad_slot // page_size
    plgpu.store(slots.at[i], jnp.where(live, page * page_size + position % page_size, pad_slot), mask=here)

"""The op slot_mapping on GPU.

Every program (block of the kernel's grid) computes the slots of BLOCK elements (tokens). It finds the batch row of each
element, then looks up the element's page in the block table.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._types import Ref
from pallas_kernels.device import Device

BLOCK = 128


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
    """Compute the slots in one kernel, with a program for every BLOCK elements."""
    options = {"page_size": page_size, "max_model_len": max_model_len, "pad_slot": pad_slot}
    result: jax.Array = pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(pl.cdiv(positions.shape[0], BLOCK),),
        out_shape=jax.ShapeDtypeStruct(positions.shape, jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret,
        name="slot_mapping",
    )(positions, rejected.astype(jnp.int32), query_start, block_table)
    return result


def _kernel(
    positions: Ref,
    rejected: Ref,
    query_start: Ref,
    block_table: Ref,
    slots: Ref,
    *,
    page_size: int,
    max_model_len: int,
    pad_slot: int,
) -> None:
    b, n = block_table.shape
    i = pl.program_id(0) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    here = i < slots.shape[0]

    def count(r: jax.Array, row: jax.Array) -> jax.Array:
        result: jax.Array = row + (i > query_start[r + 1] + r).astype(jnp.int32)
        return result

    row = lax.fori_loop(0, b, count, jnp.zeros(BLOCK, jnp.int32))
    position = plgpu.load(positions.at[i], mask=here, other=-1)
    live = plgpu.load(rejected.at[i], mask=here, other=1) == 0
    live &= (row < b) & (position >= 0) & (position < min(max_model_len, n * page_size))
    row, position = jnp.where(live, row, 0), jnp.where(live, position, 0)

    page = plgpu.load(block_table.at[row, position // page_size])
    live &= page < pad_slot // page_size
    plgpu.store(slots.at[i], jnp.where(live, page * page_size + position % page_size, pad_slot), mask=here)

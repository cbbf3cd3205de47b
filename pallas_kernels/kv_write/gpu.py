"""The op kv_write on GPU, in place.

There is one program (block of the kernel's grid) for each token and block of the token's elements.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._types import Ref
from pallas_kernels.device import Device

BLOCK = 1024


def kv_write(pages: jax.Array, kv: jax.Array, slots: jax.Array, *, device: Device) -> jax.Array:
    """Write kv[i] to the slot slots[i] of the pages in one kernel, in place."""
    p, s, *_ = pages.shape
    (m,) = slots.shape
    flat = pages.reshape(p * s, -1)  # a bitcast, as only adjacent axes are merged
    width = flat.shape[1]
    block = min(BLOCK, pl.next_power_of_2(width))
    flat = pl.pallas_call(
        functools.partial(_kernel, block=block),
        grid=(m, pl.cdiv(width, block)),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret,
        name="kv_write",
    )(slots, kv.reshape(m, width), flat)
    result: jax.Array = flat.reshape(pages.shape)
    return result


def _kernel(slots: Ref, kv: Ref, _: Ref, pages: Ref, *, block: int) -> None:
    num_slots, width = pages.shape
    m = pl.program_id(0)
    column = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    slot = slots[m]
    live = (slot >= 0) & (slot < num_slots)
    here = column < width
    value = plgpu.load(kv.at[m, column], mask=here)
    plgpu.store(pages.at[jnp.where(live, slot, 0), column], value, mask=here & live)

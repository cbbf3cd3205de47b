"""The op merge_tokens on GPU.

Every program (block of the kernel's grid) finds the rows of one block of output elements, then gathers their tokens.
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


def merge_tokens(
    tokens: jax.Array,
    next_tokens: jax.Array,
    query_start: jax.Array,
    num_rejected: jax.Array,
    *,
    fill: int,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """Merge the rows in one kernel, with a program for each block of output elements."""
    (t,) = tokens.shape
    (b,) = next_tokens.shape
    if t == 0:  # every row has only its next token, and a kernel accepts no empty operand
        return next_tokens, jnp.zeros(b, bool)
    merged, rejected = pl.pallas_call(
        functools.partial(_kernel, fill=fill),
        grid=(pl.cdiv(t + b, BLOCK),),
        out_shape=[jax.ShapeDtypeStruct((t + b,), jnp.int32)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret,
        name="merge_tokens",
    )(tokens, next_tokens, query_start, num_rejected)
    return merged, rejected != 0


def _kernel(
    tokens: Ref, next_tokens: Ref, query_start: Ref, num_rejected: Ref, merged: Ref, rejected: Ref, *, fill: int
) -> None:
    (t,), (b,) = tokens.shape, next_tokens.shape
    i = pl.program_id(0) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)

    def count(r: jax.Array, row: jax.Array) -> jax.Array:
        result: jax.Array = row + (i > query_start[r + 1] + r).astype(jnp.int32)
        return result

    row = lax.fori_loop(0, b, count, jnp.zeros(BLOCK, jnp.int32))
    live = row < b
    row = jnp.minimum(row, b - 1)

    end = plgpu.load(query_start.at[row + 1]) + row
    last = end - plgpu.load(num_rejected.at[row])  # output index of the row's next token
    token = plgpu.load(tokens.at[jnp.clip(i - row, 0, t - 1)])
    token = jnp.where(i == last, plgpu.load(next_tokens.at[row]), token)
    is_rejected = ~live | (i > last)

    here = i < merged.shape[0]
    plgpu.store(merged.at[i], jnp.where(is_rejected, jnp.int32(fill), token), mask=here)
    plgpu.store(rejected.at[i], is_rejected.astype(jnp.int32), mask=here)

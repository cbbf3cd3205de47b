"""GPU kernel that combines the results of attention over several splits of a row's keys.

XLA takes two kernels for it, and each of them costs a microsecond or more in every layer.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import start_next
from pallas_kernels._split_product import added
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.weights import interleaved_grouped as four_bits


@lowered_once("axis", "dtype", "heads", "device")
def combined(
    acc: jax.Array, top: jax.Array, total: jax.Array, *, axis: int, dtype: Any, heads: int = 0, device: Device
) -> tuple[jax.Array, jax.Array | None]:
    """Merge the partial attention results of all splits of the keys.

    acc: f32[..., D], each split's sum of values, weighted by 2**(score - top).
    top, total: f32[...], each split's largest score and sum of these weights.
    axis: axis of the splits in all three arrays.
    dtype: dtype of the result.
    heads: number of heads of a token, to also return `Prepared.sums` of the result; 0 for none. With sums, the
      result's axes in front of D list the heads of one token after the other.
    Returns: the attention's result [..., D], without the axis of the splits; and the sums [tokens, _] or None.
    """
    before, splits, after, d = acc.shape[:axis], acc.shape[axis], acc.shape[axis + 1 : -1], acc.shape[-1]
    outer, rows = math.prod(before), math.prod(after)
    shapes = [jax.ShapeDtypeStruct((outer, rows, d), dtype)]
    if heads:
        tokens = jax.ShapeDtypeStruct((outer * rows // heads, heads * d), dtype)
        shapes.append(jax.eval_shape(four_bits.summed, tokens).sums)
    result, *sums = pl.pallas_call(
        functools.partial(_combine, heads=heads, device=device),
        grid=(outer, rows),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=device.interpret,
        name="combine_splits",
    )(acc.reshape(outer, splits, rows, d), top.reshape(outer, splits, rows), total.reshape(outer, splits, rows))
    return result.reshape(*before, *after, d), sums[0] if sums else None


def _combine(acc: Ref, top: Ref, total: Ref, out: Ref, *sums: Ref, heads: int, device: Device) -> None:
    """Combine the splits of one row. All reads start before the first is waited for."""
    of, row = start_next(pl.program_id(0), device), pl.program_id(1)
    _, splits, _, d = acc.shape  # a power of two if there are sums
    column = jnp.arange(pl.next_power_of_2(d), dtype=jnp.int32)
    mask = column < d
    every = [jnp.int32(i) for i in range(splits)]
    tops = [plgpu.load(top.at[of, i, row]) for i in every]
    totals = [plgpu.load(total.at[of, i, row]) for i in every]
    accs = [plgpu.load(acc.at[of, i, row, column], mask=mask, other=0) for i in every]
    highest = functools.reduce(jnp.maximum, tops)
    factors = [jnp.exp2(x - highest) for x in tops]
    weight = added(x * factor for x, factor in zip(totals, factors, strict=True))
    value = added(x * factor for x, factor in zip(accs, factors, strict=True))
    value /= jnp.where(weight > 0, weight, 1.0)
    value = value.astype(out.dtype)
    plgpu.store(out.at[of, row, column], value, mask=mask)
    for ref in sums:
        number = of * jnp.int32(pl.num_programs(1)) + row
        token, head = lax.div(number, jnp.int32(heads)), lax.rem(number, jnp.int32(heads))
        four_bits.store_sums(ref, token, value.astype(jnp.float32), head * d)

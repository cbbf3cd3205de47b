"""GPU kernel that combines the results of attention over several splits of a row's keys.

XLA takes two kernels for it, and each of them costs a microsecond or more in every layer.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import start_next
from pallas_kernels._split_product import added
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once


@lowered_once("axis", "dtype", "device")
def combined(acc: jax.Array, top: jax.Array, total: jax.Array, *, axis: int, dtype: Any, device: Device) -> jax.Array:
    """Merge the partial attention results of all splits of the keys. Return the attention's result, without their axis.

    acc: f32[..., D], each split's sum of values, weighted by 2**(score - top).
    top, total: f32[...], each split's largest score and sum of these weights.
    axis: axis of the splits in all three arrays.
    dtype: dtype of the result.
    """
    before, splits, after, d = acc.shape[:axis], acc.shape[axis], acc.shape[axis + 1 : -1], acc.shape[-1]
    outer, rows = math.prod(before), math.prod(after)
    result: jax.Array = pl.pallas_call(
        functools.partial(_combine, device=device),
        grid=(outer, rows),
        out_shape=jax.ShapeDtypeStruct((outer, rows, d), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=device.interpret,
        name="combine_splits",
    )(acc.reshape(outer, splits, rows, d), top.reshape(outer, splits, rows), total.reshape(outer, splits, rows))
    return result.reshape(*before, *after, d)


def _combine(acc: Ref, top: Ref, total: Ref, out: Ref, *, device: Device) -> None:
    """Combine the splits of one row. All reads start before the first is waited for."""
    of, row = start_next(pl.program_id(0), device), pl.program_id(1)
    _, splits, _, d = acc.shape
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
    plgpu.store(out.at[of, row, column], value.astype(out.dtype), mask=mask)

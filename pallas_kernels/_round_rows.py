"""GPU kernel that rounds rows of activations to 8 bits. XLA would take three kernels for it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import start_next
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.weights import LARGEST, TINY

NO_FRACTION = 1.5 * 2**23  # added to a float32 below 2^22 and subtracted again, it leaves the nearest whole number


@lowered_once("dtype", "device")
def round_rows(x: jax.Array, dtype: str, *, device: Device) -> tuple[jax.Array, jax.Array]:
    """Compute `pallas_kernels.weights.scaled.rounded_rows` for x [rows, width] by one kernel."""
    rows = x.shape[0]
    values, of_rows = pl.pallas_call(
        functools.partial(_round_rows, device=device),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=device.interpret,
        name="round_rows",
    )(x)
    return values, of_rows[:, None]


def _round_rows(x: Ref, values: Ref, of_rows: Ref, *, device: Device) -> None:
    row = start_next(pl.program_id(0), device)
    at = jnp.arange(pl.next_power_of_2(x.shape[1]), dtype=jnp.int32)
    here = at < x.shape[1]
    store_rounded(plgpu.load(x.at[row, at], mask=here, other=0), row, at, here, values, of_rows, device=device)


def store_rounded(
    y: jax.Array, row: Any, at: jax.Array, here: jax.Array, values: Ref, of_rows: Ref, *, device: Device
) -> None:
    """Round y, the row `row` of activations, inside a kernel. Store its numbers and its scale.

    y: [N], 0 where `here` is False.
    at: i32[N], the places of y in the row.
    here: bool[N], whether the row has such a place.
    values: [rows, width], int8 or float8_e4m3fn.
    of_rows: f32[rows].
    """
    y = y.astype(jnp.float32)
    # NaN counts as infinite. A row with either has an infinite scale and values of 0, so every product with it is NaN.
    scale = jnp.max(jnp.where(y != y, jnp.inf, jnp.abs(y))) / LARGEST[jnp.dtype(values.dtype).name]
    scale = jnp.where(scale < TINY, 1.0, scale)
    y *= 1.0 / scale  # one division instead of one for each number, which takes several instructions
    if values.dtype == jnp.int8:  # Pallas has no `rint` for GPUs. XLA would remove the sum.
        y = jnp.rint(y) if device.interpret else (y + NO_FRACTION) - NO_FRACTION
    plgpu.store(values.at[row, at], y.astype(values.dtype), mask=here)
    plgpu.store(of_rows.at[row], scale)

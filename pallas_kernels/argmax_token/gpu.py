"""The op argmax_token on GPU for a few rows: a product as in `_few_rows`, reduced to the largest logit.

Each program (block of the kernel's grid) computes the logits of some ids. For each row it writes only its largest logit
and the id of that logit. XLA would write all logits and read them again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._few_rows import whole
from pallas_kernels._overlap import WARPS, start_next
from pallas_kernels._tiling import COLUMNS, DEPTH, MAX_ROWS, reads, row_tiles
from pallas_kernels._types import Ref
from pallas_kernels.device import Device

NONE = int(np.iinfo(np.int32).max)  # an id above all real ids, which represents no id

LogitAndId = tuple[jax.Array, jax.Array]


def fits(x: jax.Array, table: jax.Array, *, device: Device, **options: Any) -> bool:
    """Return whether the kernel supports these arguments and is meant for them: a few rows, in bfloat16."""
    small = x.size // x.shape[-1] <= MAX_ROWS and x.shape[-1] % (DEPTH // 2) == 0 and table.size <= NONE
    return small and x.dtype == table.dtype == jnp.bfloat16 and device.shares_much


def argmax_token(x: jax.Array, table: jax.Array, *, num_ids: int, device: Device) -> jax.Array:
    """Compute the op argmax_token in one kernel, and reduce the results of the kernel's programs."""
    size, depth = table.shape
    rows, programs = x.size // depth, pl.cdiv(size, COLUMNS)
    deep, stages = reads(rows, depth, COLUMNS, programs)
    shape = rows, programs
    largest, ids = pl.pallas_call(
        functools.partial(_largest, num_ids=num_ids, deep=deep, device=device),
        grid=(programs,),
        in_specs=[whole((rows, depth)), whole(table.shape)],
        out_specs=[whole(shape)] * 2,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=device.interpret,
        name="argmax_token",
    )(x.reshape(rows, depth), table)
    _, found = lax.reduce((largest, ids), (jnp.float32(-jnp.inf), jnp.int32(NONE)), larger, (1,))
    return jnp.minimum(found, num_ids - 1).reshape(x.shape[:-1])  # a valid id even if all logits are NaN


def larger(a: LogitAndId, b: LogitAndId) -> LogitAndId:
    """Return the larger of two pairs (logit, id): the pair with the larger logit or, if equal, with the lower id."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def _largest(x: Ref, table: Ref, largest: Ref, ids: Ref, *, num_ids: int, deep: int, device: Device) -> None:
    (rows, depth), size = x.shape, table.shape[0]
    tiles = [(first + jnp.arange(size, dtype=jnp.int32), first + size <= rows) for first, size in row_tiles(rows)]
    program = pl.program_id(0)
    column = program * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)

    def load(array: Ref, rows: jax.Array, at: jax.Array, full: bool) -> jax.Array:
        """Read elements [rows, at] of an array. full: whether all these rows are within the array."""
        mask = None if full else jnp.broadcast_to((rows < array.shape[0])[:, None], (rows.size, deep))
        return plgpu.load(array.at[rows[:, None], at[None, :]], mask=mask, other=None if full else 0)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = i * deep + jnp.arange(deep, dtype=jnp.int32)
        read = load(table, column, at, size % COLUMNS == 0)

        def times(row: jax.Array, full: bool) -> jax.Array:
            result: jax.Array = plgpu.dot(read, load(x, row, at, full), trans_b=True)
            return result

        return tuple(total + times(*tile) for total, tile in zip(sums, tiles, strict=True))

    nothing = tuple(jnp.zeros((COLUMNS, row.size), jnp.float32) for row, _ in tiles)
    *others, last = lax.fori_loop(0, depth // deep, step, nothing)
    for (row, _), logits in zip(tiles, (*others, start_next(last, device)), strict=True):
        logits = jnp.where((column < num_ids)[:, None], logits, -jnp.inf)
        best = jnp.max(logits, axis=0)
        which = jnp.min(jnp.where(logits == best[None, :], column[:, None], jnp.int32(NONE)), axis=0)
        plgpu.store(largest.at[row, program], best, mask=row < rows)
        plgpu.store(ids.at[row, program], which, mask=row < rows)

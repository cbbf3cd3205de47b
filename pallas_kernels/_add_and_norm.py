"""GPU kernels between two products of `_few_rows`: they sum the first one's partial results, add x and apply the norm.

Before most products several programs (blocks of the grid) share a row (`add_and_scale`), so that none has to read much.
None of them knows 1 / rms of the row. They store sums of squares, and the product multiplies its result by 1 / rms. If
activations are rounded to 8 bits, or no product of `_few_rows` follows, one program computes a whole row
(`add_and_norm`).

Both kernels allow the next kernel to start as soon as they start themselves (see `_overlap`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import start_next
from pallas_kernels._round_rows import store_rounded
from pallas_kernels._split_product import added
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.weights import Prepared
from pallas_kernels.weights import interleaved_grouped as four_bits

WIDE = 4096  # least width of x for which `add_and_norm` has 32 warps instead of 16
PIECE = 512  # number of a row's elements for a program of `add_and_scale`


@lowered_once("eps", "summed", "device")
def add_and_scale(
    x: jax.Array, parts: jax.Array, scale: jax.Array, eps: float, *, summed: bool = False, device: Device
) -> tuple[jax.Array, Prepared]:
    """Return x + the sum of `parts`, [rows, width] in the dtype of x, and its RMSNorm as `Prepared` with `squares`.

    Arguments: as in `add_and_norm`.
    """
    rows, width = x.shape
    pieces = pl.cdiv(width, PIECE)
    normed = normed_shapes(x, None, summed)
    prepared = normed if summed else Prepared(normed)
    squares: Any = jax.ShapeDtypeStruct((rows, pieces), jnp.float32)
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), prepared._replace(squares=squares)
    result = pl.pallas_call(
        functools.partial(_add_and_scale, eps=eps, device=device),
        grid=(rows, pieces),
        out_shape=jax.tree.leaves(shapes),
        compiler_params=plgpu.CompilerParams(num_warps=PIECE // 128, num_stages=1),
        interpret=device.interpret,
        name="add_and_scale",
    )(x, parts, scale)
    both: tuple[jax.Array, Prepared] = jax.tree.unflatten(jax.tree.structure(shapes), result)
    return both


def _add_and_scale(
    x: Ref, parts: Ref, scale: Ref, out: Ref, scaled: Ref, *others: Ref, eps: float, device: Device
) -> None:
    """Compute `add_and_scale`. others: references to the sums, if they are wanted, and to the squares."""
    row, piece = start_next(pl.program_id(0), device), pl.program_id(1)
    width, pieces = x.shape[1], pl.num_programs(1)
    first = piece * PIECE
    at, here, load = row_reads(width, first, PIECE)
    weight = load(scale)  # all reads start before the first write, since a later read would wait for it
    y = added_row(x, parts, row, load)
    plgpu.store(out.at[row, at], y, mask=here)
    y = y.astype(jnp.float32)
    *sums, squares = others
    plgpu.store(squares.at[row, piece], jnp.sum(y * y) / width + eps / pieces)
    store_prepared((y * weight).astype(scaled.dtype), row, at, here, first, scaled, *sums)


@lowered_once("eps", "rounded", "summed", "device")
def add_and_norm(
    x: jax.Array,
    parts: jax.Array,
    scale: jax.Array,
    eps: float,
    *,
    rounded: str | None = None,
    summed: bool = False,
    device: Device,
) -> tuple[jax.Array, Any]:
    """Return x + the sum of `parts`, and the RMSNorm of this result. Both are [rows, width] in the dtype of x.

    x: [rows, width].
    parts: f32[splits, rows, width], partial sums of a product.
    scale: f32[width], scale of the norm.
    rounded: dtype of 8 bits to which the second result is rounded, which is then a tuple as `round_rows` returns it; or
      None.
    summed: whether the second result is a `Prepared` with sums.
    """
    shapes = normed_shapes(x, rounded, summed)
    result: Any = pl.pallas_call(
        functools.partial(_add_and_norm, eps=eps, device=device),
        grid=x.shape[:1],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *jax.tree.leaves(shapes)],
        compiler_params=plgpu.CompilerParams(num_warps=16 if x.shape[1] < WIDE else 32, num_stages=1),
        interpret=device.interpret,
        name="add_and_norm",
    )(x, parts, scale)
    return result[0], normed_results(shapes, result[1:])


def normed_shapes(x: jax.Array, rounded: str | None, summed: bool) -> Any:
    """Return the shape and dtype of each array of a norm's results. Arguments: as in `add_and_norm`."""
    shape: Any = jax.ShapeDtypeStruct
    if rounded:
        return shape(x.shape, rounded), shape(x.shape[:1], jnp.float32)
    normed = shape(x.shape, x.dtype)
    return jax.eval_shape(four_bits.summed, normed) if summed else normed


def normed_results(shapes: Any, arrays: Sequence[jax.Array]) -> Any:
    """Return the arrays of a norm's results as the next product reads them. shapes: result of `normed_shapes`."""
    result = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    return (result[0], result[1][:, None]) if type(result) is tuple else result


def _add_and_norm(x: Ref, parts: Ref, scale: Ref, out: Ref, *normed: Ref, eps: float, device: Device) -> None:
    row = start_next(pl.program_id(0), device)
    at, here, load = row_reads(x.shape[1])
    weight = load(scale)  # all reads start before the first write, since a later read would wait for it
    y = added_row(x, parts, row, load)
    store_normed(y, weight, row, at, here, out, *normed, eps=eps, device=device)


def row_reads(
    width: int, first: Any = 0, size: int | None = None
) -> tuple[jax.Array, jax.Array, Callable[..., jax.Array]]:
    """Return what reads rows of `width` elements, or a piece of each, inside a kernel.

    first: place of the piece's first element.
    size: number of the piece's elements, a power of two; None for whole rows.
    Returns: the places i32[N], for whole rows padded to a power of two; bool[N], whether a row has such a place; and a
      function of an array and the indices of a row that reads the places as f32[N], 0 in the padding.
    """
    at = first + jnp.arange(size or pl.next_power_of_2(width), dtype=jnp.int32)
    here = at < width

    def load(ref: Ref, *index: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[(*index, at)], mask=here, other=0).astype(jnp.float32)

    return at, here, load


def added_row(x: Ref, parts: Ref, row: Any, load: Callable[..., jax.Array]) -> jax.Array:
    """Return x + the sum of `parts` for the row `row` in the dtype of x, inside a kernel.

    x, parts: as in `add_and_norm`.
    load: the function that `row_reads` returned.
    """
    reads = [load(x, row), *(load(parts, jnp.int32(part), row) for part in range(parts.shape[0]))]
    return added(reads).astype(x.dtype)


def store_prepared(y: jax.Array, row: Any, at: jax.Array, here: jax.Array, first: Any, rows: Ref, *sums: Ref) -> None:
    """Store y, elements of the row `row`, and their sums if the reference to `Prepared.sums` is given, inside a kernel.

    at, here: as in `store_rounded`.
    first: place of the first element.
    """
    plgpu.store(rows.at[row, at], y, mask=here)
    for ref in sums:
        four_bits.store_sums(ref, row, y.astype(jnp.float32), first)


def store_normed(
    y: jax.Array,
    weight: jax.Array,
    row: Any,
    at: jax.Array,
    here: jax.Array,
    out: Ref,
    *normed: Ref,
    eps: float,
    device: Device,
) -> None:
    """Store y, the row `row` of the residual stream, and its RMSNorm, inside a kernel.

    y: [N] in the dtype of `out`, 0 where `here` is False.
    weight: f32[N], scale of the norm.
    at, here: as in `store_rounded`.
    out: [rows, width].
    normed: [rows, width]; or the values and scales of the rows if the norm is rounded to 8 bits, as in `store_rounded`;
      or the rows and sums of a `Prepared`.
    """
    plgpu.store(out.at[row, at], y, mask=here)
    y = y.astype(jnp.float32)
    y *= lax.rsqrt(jnp.sum(y * y) / out.shape[1] + eps) * weight
    if normed[0].dtype != out.dtype:
        return store_rounded(y.astype(out.dtype), row, at, here, *normed, device=device)
    store_prepared(y.astype(out.dtype), row, at, here, 0, *normed)

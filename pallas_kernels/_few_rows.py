"""GPU kernels for a few rows: the product of x with a weight matrix, and the sum and norm between two such products.

Each weight is read once. The weights are the left operand of the matrix units. A matrix unit takes 64 columns of
weights straight from shared memory, together with the rows of x. The rows of x are padded to a multiple of 16, and
divided into tiles whose numbers of rows are powers of two. If the weights were the right operand, each weight would
pass through registers first.

The depth (the dimension that is summed over) is split until there are enough programs (blocks of the kernel's grid).
The partial sums, f32[splits, rows, width], are left for the next kernel to add up. So a product, the sum
of its parts, the addition to x and the norm of the result take two kernels instead of three or four.

A matrix in 8 bits (`weights/interleaved.py`) is read as words of four values, which are converted to bfloat16 in
registers. Scales of outputs are applied to the sums at the end, scales of blocks to the product with each block. If
activations are rounded to 8 bits, too, x holds the rounded numbers in bfloat16, which represents them exactly.

Both kernels let the next kernel start early (see `_overlap`): `product` once its last weights have arrived,
`add_and_norm` at its start. Before `product` waits for its last weights, it also prefetches the first weights of the
next product. One row and small matrices are for `_split_product`. Many rows and the largest matrices are left to XLA's
own products (see docs/notes/gpu.md).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import WARPS, prefetch, start_next
from pallas_kernels._split_product import activate, added, fewest_splits
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.weights import AnyWeight, Weight
from pallas_kernels.weights.interleaved import CHUNK, MAX_SIZE, QUARTER, Interleaved, unpacked
from pallas_kernels.weights.scaled import rounded_rows

MIN_ROWS, MAX_ROWS = 16, 96  # least and largest number of rows of x that a program multiplies; fewer are padded
COLUMNS, DEPTH = 64, 128  # columns and rows of weights in most reads; see `num_columns` and `reads` for others
UNDER_WAY = 1 << 16  # largest number of bytes of weights that a program has in flight; more reads slow each other
PROGRAMS = 96  # least number of programs of a kernel, as far as the depth can be split
ALONE = 132  # largest number of programs that have a multiprocessor each; with more, two share a multiprocessor
SHARED = 218 << 10  # bytes of a multiprocessor's shared memory that its programs may use for reads
PROGRAMS_8_BITS = 200, 192  # like PROGRAMS, for 8-bit weights: with up to 32 rows of x, and with more


def covers(rows: int, *weights: AnyWeight, device: Device) -> bool:
    """Return whether the kernels of this file support these weights for this number of rows of x.

    The kernels are for a few rows, for matrices that divide into whole reads and are multiplied in bfloat16, and for
    GPUs with much shared memory (`Device.shares_much`).
    """
    if rows > MAX_ROWS or not device.shares_much:
        return False
    return all(
        w.shape[0] % (DEPTH // 2) == 0
        and w.shape[1] % COLUMNS == 0
        and w.size < MAX_SIZE
        and w.dtype == jnp.bfloat16
        and readable(w)
        for w in weights
    )


def readable(weight: AnyWeight) -> bool:
    """Return whether the kernels support the form of a weight: a plain array, or 8 bits with blocks of whole chunks."""
    if not isinstance(weight, Weight):
        return True
    return isinstance(weight, Interleaved) and weight.shape[0] // weight.scale.shape[1] % CHUNK == 0


def num_columns(rows: int, width: int, *, gated: bool) -> int:
    """Return the number of matrix columns that a program multiplies.

    Every program reads all rows of x. With many rows, twice the columns and two splits of the depth are faster.

    rows, width: number of rows of x, and of columns of the matrix.
    gated: whether the columns are blocks of gate and up, whose depth is not split.
    """
    parts = 2 if rows > 2 * MIN_ROWS and not gated else 1
    enough = width % (2 * COLUMNS) == 0 and width // (2 * COLUMNS) * parts >= PROGRAMS
    return 2 * COLUMNS if enough else COLUMNS


def num_splits(depth: int, blocks: int, programs: int = PROGRAMS) -> int:
    """Return the number of splits of the depth (the summed dimension).

    blocks: number of programs without splits.
    programs: least number of programs to reach by splitting.
    """
    return fewest_splits(depth // math.gcd(depth, DEPTH), lambda splits: splits * blocks >= programs)


def row_tiles(rows: int) -> list[tuple[int, int]]:
    """Divide rows of x into tiles for the matrix units. Return (first row, number of rows) of each tile.

    The numbers are powers of two, at least MIN_ROWS.
    """
    full = pl.cdiv(rows, MIN_ROWS) * MIN_ROWS
    tiles = []
    first = 0
    while first < full:
        size = 1 << ((full - first).bit_length() - 1)  # the largest power of two that fits into the remaining rows
        tiles.append((first, size))
        first += size
    return tiles


def reads(rows: int, depth: int, columns: int, programs: int) -> tuple[int, int]:
    """Return (number of weight rows in a read, number of pipeline stages) of a program, for weights in bfloat16.

    A stage is one read of weights and of the matching part of x. There is one stage more than reads should be in
    flight, for the read that is being multiplied; fewer if shared memory lacks room.

    rows: number of rows of x.
    depth, columns: number of rows of the weight matrix, and of the columns that a program multiplies.
    programs: number of programs of the kernel.
    """
    alone = programs <= ALONE
    shared = SHARED if alone else SHARED // 2
    deep = math.gcd(depth, DEPTH)
    width = 2 * (columns + padded_rows(rows))  # bytes of a read per weight row
    if 3 * deep * width > shared or (alone and columns > COLUMNS):
        deep = math.gcd(depth, DEPTH // 2)
    return deep, min(1 + UNDER_WAY // (2 * columns * deep), shared // (deep * width))


def padded_rows(rows: int) -> int:
    """Return the number of rows of x that the matrix units multiply."""
    return sum(size for _, size in row_tiles(rows))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The division of a product among programs (blocks of the kernel's grid).

    columns: number of matrix columns that a program multiplies.
    splits: number of splits of the depth.
    deep: number of weight rows in a read.
    stages: number of pipeline stages, each with one read.
    """

    columns: int
    splits: int
    deep: int
    stages: int


def tiling(rows: int, weights: AnyWeight, *, gated: bool) -> Tiling:
    """Return the division of a product that was measured to be the fastest (docs/notes/gpu.md).

    rows: number of rows of x.
    gated: whether the columns are blocks of gate and up, whose depth is not split.
    """
    depth, width = weights.shape
    if isinstance(weights, Interleaved):
        few = rows <= 2 * MIN_ROWS
        columns = COLUMNS if few or width % (2 * COLUMNS) else 2 * COLUMNS
        splits = 1 if gated else num_splits(depth, width // columns, PROGRAMS_8_BITS[not few])
        share = depth // splits
        deep = 2 * CHUNK if few and weights.by_output and share % (2 * CHUNK) == 0 else CHUNK
        stages = 6 if few and deep == CHUNK else 3
        fitting = SHARED // 2 // (deep * (columns + 2 * padded_rows(rows)))
        return Tiling(columns, splits, deep, min(stages, fitting))
    columns = num_columns(rows, width, gated=gated)
    splits = 1 if gated else num_splits(depth, width // columns)
    return Tiling(columns, splits, *reads(rows, depth, columns, width // columns * splits))


def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return a Pallas block spec that gives every program the same block of an array, from its first element on.

    shape: shape of the block; the array's own shape to give all of it.
    """
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def prefetch_options(
    then: AnyWeight | None, rows: int, programs: int, device: Device
) -> tuple[list[jax.Array], dict[str, int] | None]:
    """Return ([values of the next product's matrix], options of `prefetch` for it), or ([], None) for no prefetch.

    then: matrix of the next product; None if there is none.
    rows: number of rows of x.
    programs: number of programs of the kernel that prefetches.
    """
    # A product of more rows waits for more than its weights. A matrix in another form is left to the compiler.
    if then is None or rows > MIN_ROWS or device.interpret or not readable(then):
        return [], None
    depth, width = then.shape
    if isinstance(then, Interleaved):  # the first 256 bytes of each output are the first read
        parts = num_splits(depth, width // COLUMNS, PROGRAMS_8_BITS[0])
        if depth // parts < 256:  # two lines of memory would be the next part's, too
            return [], None
        return [then.values], {
            "parts": parts,
            "apart": depth // parts,
            "pairs": width,
            "stride": depth,
            "programs": programs,
        }
    parts = num_splits(depth, width // COLUMNS)
    apart = then.size * then.dtype.itemsize // parts
    return [then], {"parts": parts, "apart": apart, "pairs": apart // 256, "stride": 256, "programs": programs}  # type: ignore[list-item]


@lowered_once("gated", "device")
def product(
    x: jax.Array,
    weights: jax.Array,
    *,
    gated: tuple[str, int] | None = None,
    then: jax.Array | None = None,
    device: Device,
) -> jax.Array:
    """Return x @ weights as partial sums f32[splits, rows, width], which the caller adds up over the first axis.

    Args:
      x: [rows, depth], at most MAX_ROWS rows.
      weights: [depth, width], for which `covers` returns True.
      gated: (activation, block) if the weights are those of gate and up: `block` columns of gate and `block` columns of
        up in turn. The result is then activation(gate) * up, [rows, width / 2] in the dtype of x. None for other
        weights.
      then: the matrix of the next product, whose first rows are prefetched; or None.
      device: the device that the program is compiled for.
    """
    rows, depth = x.shape
    width = weights.shape[1]
    tile = tiling(rows, weights, gated=gated is not None)
    if gated is None:
        grid = width // tile.columns, tile.splits
        out = jax.ShapeDtypeStruct((tile.splits, rows, width), jnp.float32)
    else:
        # The grid is (index of a block of gate and up columns, part of that block). If both were computed by dividing
        # one index, Triton could not infer the alignment of the columns.
        grid = width // (2 * gated[1]), 2 * gated[1] // tile.columns
        out = jax.ShapeDtypeStruct((rows, width // 2), x.dtype)
    dtype = None
    arrays: list[jax.Array] = [weights]
    if isinstance(weights, Interleaved):
        dtype = weights.values.dtype
        words = lax.bitcast_convert_type(weights.values.reshape(width, depth // 4, 4), jnp.int32)
        arrays = [words, weights.scale]
        if weights.activations:
            x, of_rows = rounded_rows(x, weights.activations)
            x = x.astype(jnp.bfloat16)
            arrays.append(of_rows[:, 0])
    next_weights, ahead = prefetch_options(then, rows, math.prod(grid), device)
    result: jax.Array = pl.pallas_call(
        functools.partial(
            _product, dtype=dtype, rounded=len(arrays) > 2, gated=gated, tile=tile, ahead=ahead, device=device
        ),
        grid=grid,
        in_specs=[whole(x.shape), *(whole(array.shape) for array in arrays), *(whole((1, 1)) for _ in next_weights)],
        out_specs=whole(out.shape),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=tile.stages),
        interpret=device.interpret,
        name="product",
    )(x, *arrays, *next_weights)
    return result


def _product(
    x: Ref,
    weights: Ref,
    *refs: Ref,
    dtype: Any,
    rounded: bool,
    gated: tuple[str, int] | None,
    tile: Tiling,
    ahead: dict[str, int] | None,
    device: Device,
) -> None:
    """Compute `product`.

    dtype: dtype of 8-bit weights, which are given as words and scales; None for other weights.
    rounded: whether the scale of each row of x is given, too.
    """
    in_8_bits, columns, deep = dtype is not None, tile.columns, tile.deep
    *rest, out = refs
    scale: Any = rest.pop(0) if in_8_bits else None
    of_rows: Any = rest.pop(0) if rounded else None
    next_weights = rest
    rows, depth = x.shape
    tiles = [(first + jnp.arange(size, dtype=jnp.int32), first + size <= rows) for first, size in row_tiles(rows)]
    each = jnp.arange(columns, dtype=jnp.int32)
    program, part = pl.program_id(0), pl.program_id(1)  # `part` is a split of the depth, or a part of a gate/up block
    if gated is None:
        share = depth // out.shape[0]
        begin, column = part * share, program * columns + each
    else:  # half of a program's columns are columns of gate, the other half are the corresponding columns of up
        (activation, block), half = gated, columns // 2
        share, begin = depth, 0
        column = program * (2 * block) + part * half + each + lax.div(each, half) * (block - half)
    by_block = in_8_bits and scale.shape[1] > 1

    def scale_of(first: Any) -> jax.Array:
        """Return the scales f32[columns, 1] of the block of 8-bit weights that begins at row `first`."""
        column_blocks, row_blocks = scale.shape
        block = lax.div(column, weights.shape[0] // column_blocks)
        of_block = plgpu.load(scale.at[block, lax.div(first, depth // row_blocks)])[:, None]
        return of_block * 64.0 if dtype == jnp.int8 else of_block  # `unpacked` divides integers by 64

    def read(first: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Return the weights of a step that begins at row `first`, as pairs (weights, their rows of the matrix)."""
        if not in_8_bits:
            at = first + jnp.arange(deep, dtype=jnp.int32)
            return [(plgpu.load(weights.at[at[:, None], column[None, :]]), at)]
        i = jnp.arange(deep // 4, dtype=jnp.int32)
        words = plgpu.load(weights.at[column[:, None], (lax.div(first, 4) + i)[None, :]])
        at = first + lax.div(i, QUARTER) * CHUNK + lax.rem(i, QUARTER)
        return [(quarter, at + j * QUARTER) for j, quarter in enumerate(unpacked(words, dtype, device))]

    def step(i: jax.Array, carry: tuple[tuple[jax.Array, ...], jax.Array]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        sums, prefetched = carry
        if ahead is not None:
            prefetched += prefetch(*next_weights, **ahead, now=i == share // deep - 1)
        first = begin + i * deep
        pieces = read(first)

        def add(total: jax.Array, row: jax.Array, full: bool) -> jax.Array:
            mask = None if full else jnp.broadcast_to((row < rows)[:, None], (row.size, pieces[0][1].size))
            for piece, at in pieces:
                some = plgpu.load(x.at[row[:, None], at[None, :]], mask=mask, other=None if full else 0)
                total += plgpu.dot(piece, some, trans_a=not in_8_bits, trans_b=True)
            return total

        if not by_block:
            return tuple(add(total, *some) for total, some in zip(sums, tiles, strict=True)), prefetched
        of_block = scale_of(first)
        products = [add(jnp.zeros_like(total), *some) * of_block for total, some in zip(sums, tiles, strict=True)]
        return tuple(total + product for total, product in zip(sums, products, strict=True)), prefetched

    nothing = tuple(jnp.zeros((columns, row.size), jnp.float32) for row, _ in tiles)
    (*others, last), prefetched = lax.fori_loop(0, share // deep, step, (nothing, jnp.int32(0)))
    if ahead is not None:
        last += prefetched.astype(jnp.float32)
    for (row, _), result in zip(tiles, (*others, start_next(last, device)), strict=True):
        if in_8_bits and not by_block:
            result *= scale_of(0)
        if rounded:
            result *= plgpu.load(of_rows.at[row], mask=row < rows, other=0)[None, :]
        to: tuple[Any, ...] = (part, row[None, :], column[:, None])
        if gated is not None:
            gate, up = lax.split(result, (half, half))
            result = (activate(activation, gate) * up).astype(out.dtype)
            to = row[None, :], (program * block + part * half + jnp.arange(half, dtype=jnp.int32))[:, None]
        plgpu.store(out.at[to], result, mask=jnp.broadcast_to((row < rows)[None, :], result.shape))


@lowered_once("eps", "device")
def add_and_norm(
    x: jax.Array, parts: jax.Array, scale: jax.Array, eps: float, *, device: Device
) -> tuple[jax.Array, jax.Array]:
    """Return x + the sum of `parts`, and the RMSNorm of this result. Both are [rows, width] in the dtype of x.

    x: [rows, width].
    parts: f32[splits, rows, width], partial sums of a product.
    scale: f32[width], scale of the norm.
    """
    result: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_add_and_norm, eps=eps, device=device),
        grid=x.shape[:1],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=device.interpret,
        name="add_and_norm",
    )(x, parts, scale)
    return result


def _add_and_norm(x: Ref, parts: Ref, scale: Ref, out: Ref, normed: Ref, *, eps: float, device: Device) -> None:
    row = start_next(pl.program_id(0), device)
    width = x.shape[1]
    at = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    here = at < width

    def load(ref: Ref, *index: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[(*index, at)], mask=here, other=0).astype(jnp.float32)

    weight = load(scale)  # all reads start before the first write, since a later read would wait for it
    y = added([load(x, row), *(load(parts, jnp.int32(part), row) for part in range(parts.shape[0]))]).astype(out.dtype)
    plgpu.store(out.at[row, at], y, mask=here)
    y = y.astype(jnp.float32)
    y *= lax.rsqrt(jnp.sum(y * y) / width + eps) * weight
    plgpu.store(normed.at[row, at], y.astype(normed.dtype), mask=here)

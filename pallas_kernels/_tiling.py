"""Tiling of the kernel for a few rows of activations (`_few_rows`): what a program computes, and what a step loads."""

import dataclasses
import functools
import math
import operator

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._overlap import WARPS
from pallas_kernels._split_product import fewest_splits
from pallas_kernels.device import Device
from pallas_kernels.weights import AnyWeight, Weight
from pallas_kernels.weights import interleaved_grouped as four_bits
from pallas_kernels.weights.grouped import Layout
from pallas_kernels.weights.interleaved import CHUNK, MAX_SIZE, MAX_SIZE_8_BITS, Interleaved
from pallas_kernels.weights.interleaved_grouped import InterleavedGrouped
from pallas_kernels.weights.scaled import Scaled

MIN_ROWS, MAX_ROWS = 16, 96  # least and largest number of rows of x that a program multiplies; fewer are padded
# Number of rows of a tile for which Triton takes the older matrix units. They read both operands from registers, so a
# step needs no fence and does not wait for them. Only integers of 4 bits without offsets have such tiles.
FEWEST_ROWS = 8
COLUMNS, DEPTH = 64, 128  # columns and rows of weights in most reads; see `num_columns` and `reads` for others
UNDER_WAY = 1 << 16  # largest number of bytes of weights that a program has in flight; more reads slow each other
PROGRAMS = 96  # least number of programs of a kernel, as far as the depth can be split
ALONE = 132  # largest number of programs that have a multiprocessor each; with more, two share a multiprocessor
SHARED = 218 << 10  # bytes of a multiprocessor's shared memory that its programs may use for reads
PROGRAMS_8_BITS = 200, 192  # like PROGRAMS, for 8-bit weights: with up to 32 rows of x, and with more
PROGRAMS_4_BITS = 500, 384, 200  # like PROGRAMS, for 4-bit weights: with a tile of 8 rows, up to 32 rows, and more
ALL_AT_ONCE = 5 * ALONE  # largest number of programs of a kernel in which each may start all its reads at once
# Columns of a program for 4-bit weights and many rows, and the most rows for which registers then suffice. These are
# many columns, because each program reads all rows of x, which takes longer than reading its weights.
WIDE, MAX_ROWS_WIDE = 256, 80
LEAST_STEPS_WIDE = 4  # least number of reads of a program for which WIDE columns are faster
PROGRAMS_ROUNDED = 132  # like PROGRAMS, for 8-bit weights and activations


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
        and w.size < (MAX_SIZE_8_BITS if isinstance(w, Interleaved) else MAX_SIZE)
        and w.dtype == jnp.bfloat16
        and readable(w)
        for w in weights
    )


def readable(weight: AnyWeight) -> bool:
    """Return whether the kernels support the form of a weight.

    They support plain arrays, 8 bits with blocks of whole chunks, 8 bits with activations of the same dtype, and 4 bits
    with whole chunks.
    """
    if isinstance(weight, Interleaved):
        return weight.shape[0] // weight.scale.shape[1] % CHUNK == 0
    if isinstance(weight, InterleavedGrouped):
        return weight.shape[0] % four_bits.CHUNK == 0
    if isinstance(weight, Weight):
        return type(weight) is Scaled and weight.activations == weight.values.dtype
    return True


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


def least_rows(rows: int, layout: Layout | None) -> int:
    """Return the least number of rows of a tile.

    rows: number of rows of x.
    layout: layout of 4-bit weights; None for others.
    """
    return FEWEST_ROWS if layout is not None and not layout.offset and rows <= FEWEST_ROWS else MIN_ROWS


def row_tiles(rows: int, least: int = MIN_ROWS) -> list[tuple[int, int]]:
    """Divide rows of x into tiles for the matrix units. Return (first row, number of rows) of each tile.

    The numbers are powers of two, at least `least`.
    """
    full = pl.cdiv(rows, least) * least
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


def padded_rows(rows: int, least: int = MIN_ROWS) -> int:
    """Return the number of rows of x that the matrix units multiply. least: as in `row_tiles`."""
    return sum(size for _, size in row_tiles(rows, least))


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

    @property
    def warps(self) -> int:
        """The number of warps of a program."""
        return WARPS * max(1, self.columns // (2 * COLUMNS))


def tiling(rows: int, weights: AnyWeight, *, gated: int, wide: bool = True) -> Tiling:
    """Return the division of a product that was measured to be the fastest (docs/notes/gpu.md).

    rows: number of rows of x.
    gated: number of columns of a block of gate and its block of up, whose depth is not split; 0 for other columns.
    wide: whether a program may have WIDE columns.
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
    if isinstance(weights, InterleavedGrouped):
        found = wide_tiling(rows, weights, gated=gated) if wide and rows > 2 * MIN_ROWS else None
        return found or tiling_4_bits(rows, weights, gated=gated)
    columns = num_columns(rows, width, gated=bool(gated))
    if isinstance(weights, Scaled):
        splits = 1 if gated else num_splits(depth, width // columns, PROGRAMS_ROUNDED)
        deep = math.gcd(depth // splits, 2 * DEPTH if rows <= 2 * MIN_ROWS else DEPTH)
        return Tiling(columns, splits, deep, min(5, SHARED // 2 // (deep * (columns + padded_rows(rows)))))
    splits = 1 if gated else num_splits(depth, width // columns)
    return Tiling(columns, splits, *reads(rows, depth, columns, width // columns * splits))


def tiling_4_bits(rows: int, weights: InterleavedGrouped, *, gated: int) -> Tiling:
    """Return `tiling` for a matrix in 4 bits, with COLUMNS columns a program."""
    depth, width = weights.shape
    few, deep, blocks = rows <= 2 * MIN_ROWS, four_bits.CHUNK, width // COLUMNS
    least, splits = least_rows(rows, weights.layout), 1
    for programs in PROGRAMS_4_BITS[0 if least == FEWEST_ROWS else 1 if few else 2 :] if not gated else ():
        splits = fewest_splits(depth // deep, functools.partial(operator.le, -(-programs // blocks)))
        if splits * blocks < 2 * programs:  # else the depth has no divisor near, and fewer programs may be better
            break
    of_stage = deep * (COLUMNS // 2 + 2 * padded_rows(rows, least))
    fitting = SHARED // (3 if few else 2) // of_stage
    stages = min(4, fitting if fitting > 1 else SHARED // of_stage)
    steps = depth // splits // deep
    ahead = steps if splits * blocks <= ALL_AT_ONCE else steps - 1
    return Tiling(COLUMNS, splits, deep, min(stages, 1 + max(1, ahead)))  # n stages are n - 1 reads ahead


def wide_tiling(rows: int, weights: InterleavedGrouped, *, gated: int) -> Tiling | None:
    """Return a tiling for many rows and 4-bit weights, with WIDE columns a program; None if these cannot have one.

    Arguments: as in `tiling`.
    """
    depth, width = weights.shape
    if rows > MAX_ROWS_WIDE or width % WIDE or gated % WIDE or not four_bits.can_be_scaled(weights.layout):
        return None
    deep, blocks = four_bits.CHUNK, width // WIDE
    steps = depth // deep
    splits = 1 if gated else max((n for n in range(1, steps + 1) if steps % n == 0 and n * blocks <= ALONE), default=1)
    stages = min(4, SHARED // (deep * (WIDE // 2 + 2 * padded_rows(rows))))
    enough = splits * blocks >= PROGRAMS and steps // splits >= LEAST_STEPS_WIDE
    return Tiling(WIDE, splits, deep, stages) if enough else None

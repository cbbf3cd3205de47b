"""GPU kernel for the product of a few rows of x with a weight matrix.

Each weight is read once. The weights are the left operand of the matrix units. A matrix unit takes 64 columns of
weights straight from shared memory, together with the rows of x. The rows of x are padded to a multiple of 16, and
divided into tiles whose numbers of rows are powers of two. If the weights were the right operand, each weight would
pass through registers first. Weights in 4 bits pass through registers in any case. With up to 8 rows of x they are
multiplied by the older matrix units, which take 8 rows at a time and need no fence.

The depth (the dimension that is summed over) is split until there are enough programs (blocks of the kernel's grid).
The partial sums, f32[splits, rows, width], are left for the next kernel to add up. So a product, the sum
of its parts, the addition to x and the norm of the result take two kernels instead of three or four (`_add_and_norm`).

A matrix in 8 bits (`weights/interleaved.py`) is read as words of four values, which are converted to bfloat16 in
registers. A matrix in 4 bits (`weights/interleaved_grouped.py`) is read as words of eight. Scales of outputs are
applied to the sums at the end, scales of blocks and groups to the product with each block or group. If
activations are rounded to 8 bits, too, the matrix units multiply 8-bit numbers with each other, and nothing is
converted.

The kernel lets the next kernel start early (see `_overlap`), once its last weights have arrived. Before it waits for
them, it also prefetches the first weights of the next product. One row and small matrices are for `_split_product`.
Many rows and the largest matrices are left to XLA's own products (see docs/notes/gpu.md).
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import _dot_8_bits, _split_product
from pallas_kernels._overlap import prefetch, start_next
from pallas_kernels._round_rows import round_rows
from pallas_kernels._split_product import activate
from pallas_kernels._tiling import (
    COLUMNS,
    MIN_ROWS,
    WIDE,
    Tiling,
    covers,
    least_rows,
    num_splits,
    readable,
    row_tiles,
    tiling,
)
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.weights import AnyWeight, Prepared
from pallas_kernels.weights import interleaved_grouped as four_bits
from pallas_kernels.weights.grouped import Layout
from pallas_kernels.weights.interleaved import CHUNK, QUARTER, Interleaved, unpacked
from pallas_kernels.weights.interleaved_grouped import InterleavedGrouped
from pallas_kernels.weights.scaled import Scaled

# Parts of a matrix, each with a reference to the array that it is multiplied with, and the columns of that array.
Pieces = list[tuple[jax.Array, Ref, jax.Array]]


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
    if isinstance(then, Scaled | InterleavedGrouped):  # the first 256 bytes of each output are the first reads
        values = then.values if isinstance(then, Scaled) else then.values[0]
        parts, stride = tiling(rows, then, gated=0).splits, values.shape[1]
        if stride // parts < 256:  # two lines of memory would be the next part's, too
            return [], None
        return [values], {
            "parts": parts,
            "apart": stride // parts,
            "pairs": width,
            "stride": stride,
            "programs": programs,
        }
    parts = num_splits(depth, width // COLUMNS)
    apart = then.size * then.dtype.itemsize // parts
    return [then], {"parts": parts, "apart": apart, "pairs": apart // 256, "stride": 256, "programs": programs}  # type: ignore[list-item]


@lowered_once("gated", "device")
def product(
    x: Any,
    weights: jax.Array,
    *,
    gated: tuple[str, int] | None = None,
    then: jax.Array | None = None,
    device: Device,
) -> Any:
    """Return x @ weights as partial sums f32[splits, rows, width], which the caller adds up over the first axis.

    Args:
      x: [rows, depth], at most MAX_ROWS rows. For weights that have rounded activations, x may be the result of
        `round_rows`; for others, a `Prepared`.
      weights: [depth, width], for which `covers` returns True.
      gated: (activation, block) if the weights are those of gate and up: `block` columns of gate and `block` columns of
        up in turn. The result is then activation(gate) * up, [rows, width / 2] in the weights' dtype, as a `Prepared`
        if the product with `then` reads one. None for other weights.
      then: the matrix of the next product, whose first rows are prefetched; or None.
      device: the device that the program is compiled for.
    """
    depth, width = weights.shape
    rows = jax.tree.leaves(x)[0].shape[0]
    wide = not device.reaches(10, 0)  # the matrix units' own memory on a Blackwell GPU lacks room
    tile = tiling(rows, weights, gated=0 if gated is None else 2 * gated[1], wide=wide)
    if gated is None:
        grid = width // tile.columns, tile.splits
        out: list[Any] = [jax.ShapeDtypeStruct((tile.splits, rows, width), jnp.float32)]
    else:
        # The grid is (index of a block of gate and up columns, part of that block). If both were computed by dividing
        # one index, Triton could not infer the alignment of the columns.
        grid = width // (2 * gated[1]), 2 * gated[1] // tile.columns
        like = jax.ShapeDtypeStruct((rows, width // 2), weights.dtype)
        out = jax.tree.leaves(jax.eval_shape(four_bits.summed, like)) if sums_for(then, rows, device) else [like]
    dtype: Any = None
    layout: Layout | None = None
    x, sums, squares = x if isinstance(x, Prepared) else (x, None, None)
    inputs: list[jax.Array] = [x]
    of_rows = [] if squares is None else [squares]
    arrays: list[jax.Array] = [weights]
    rounded = False
    if isinstance(weights, Interleaved):
        dtype = weights.values.dtype
        words = lax.bitcast_convert_type(weights.values.reshape(width, depth // 4, 4), jnp.int32)
        arrays = [words, weights.scale]
    elif isinstance(weights, InterleavedGrouped):
        layout, arrays = weights.layout, weights.arrays()
        if layout.offset:
            inputs = [x, four_bits.summed(x).sums if sums is None else sums]
    elif isinstance(weights, Scaled):
        x, scale = x if isinstance(x, tuple) else round_rows(x, weights.values.dtype.name, device=device)
        rounded, inputs, of_rows = True, [x], [scale]
        arrays = [weights.values, weights.of_outputs()[:, None]]
    next_weights, ahead = prefetch_options(then, rows, math.prod(grid), device)
    result: list[jax.Array] = pl.pallas_call(
        functools.partial(
            _product,
            counts=(len(inputs), len(of_rows), len(arrays), len(next_weights)),
            dtype=dtype,
            layout=layout,
            rounded=rounded,
            gated=gated,
            tile=tile,
            ahead=ahead,
            device=device,
        ),
        grid=grid,
        in_specs=[
            *(whole(array.shape) for array in (*inputs, *of_rows, *arrays)),
            *(whole((1, 1)) for _ in next_weights),
        ],
        out_specs=[whole(array.shape) for array in out],
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=device.interpret,
        name="product",
    )(*inputs, *of_rows, *arrays, *next_weights)
    return Prepared(*result) if len(result) > 1 else result[0]


def multiplies(weight: Any, rows: int, device: Device) -> bool:
    """Return whether `product` is used for this number of rows and `weight`; False if `weight` is None."""
    if weight is None or not covers(rows, weight, device=device):
        return False
    return rows > 1 or not _split_product.covers(weight)


def sums_for(weight: Any, rows: int, device: Device) -> bool:
    """Return whether the kernel for the product of so many rows with `weight` reads `Prepared.sums`."""
    return four_bits.reads_sums(weight) and covers(rows, weight, device=device)


def _product(
    *refs: Ref,
    counts: tuple[int, ...],
    dtype: Any,
    layout: Layout | None,
    rounded: bool,
    gated: tuple[str, int] | None,
    tile: Tiling,
    ahead: dict[str, int] | None,
    device: Device,
) -> None:
    """Compute `product`.

    refs: references to x, as one or two arrays; what its rows' factors are made of, an array or none; the arrays of the
      matrix; those to prefetch; and the results.
    counts: numbers of the first four.
    dtype: dtype of 8-bit weights that are given as words; None for others.
    layout: layout of 4-bit weights; None for others.
    rounded: whether weights and x are both in 8 bits. If so, the factor of a row is its scale, from [rows, 1]; else it
      is 1 / rms, computed from `Prepared.squares`, or 1 without these.
    """
    columns, deep = tile.columns, tile.deep
    of_x, of_rows, arrays, next_weights, (out, *sums_out) = (
        refs[first:last] for first, last in itertools.pairwise([0, *itertools.accumulate(counts), len(refs)])
    )
    x, weights = of_x[0], arrays[0]
    scale: Any = arrays[1] if len(arrays) > 1 else None
    rows, depth = x.shape
    sizes = row_tiles(rows, least_rows(rows, layout))
    tiles = [(first + jnp.arange(size, dtype=jnp.int32), first + size <= rows) for first, size in sizes]
    each = jnp.arange(columns, dtype=jnp.int32)
    program, part = pl.program_id(0), pl.program_id(1)  # `part` is a split of the depth, or a part of a gate/up block
    if gated is None:
        share = depth // out.shape[0]
        begin, column = part * share, program * columns + each
    else:  # half of a program's columns are columns of gate, the other half are the corresponding columns of up
        (activation, block), half = gated, columns // 2
        share, begin = depth, 0
        column = program * (2 * block) + part * half + each + lax.div(each, half) * (block - half)
    at_end = scale is not None and layout is None and scale.shape[1] == 1  # whether scales apply to whole sums

    scaled = columns == WIDE  # whether 4-bit weights are scaled before the product, instead of its sums after it
    order = four_bits.order(arrays) if layout is not None and layout.offset else None

    def scale_of(first: Any) -> jax.Array:
        """Return the scales f32[columns, 1] of the block of 8-bit weights that begins at row `first`."""
        column_blocks, row_blocks = scale.shape
        block = lax.div(column, weights.shape[0] // column_blocks)
        of_block = plgpu.load(scale.at[block, lax.div(first, depth // row_blocks)])[:, None]
        return of_block * 64.0 if dtype == jnp.int8 else of_block  # `unpacked` divides integers by 64

    def scales_of_groups(first: jax.Array) -> list[jax.Array]:
        """Return the scales of the groups of 4-bit weights in the step that begins at row `first`."""
        return four_bits.of_groups(scale, depth, column, first) if layout is not None and not scaled else []

    def read(first: jax.Array, of_groups: list[jax.Array]) -> Sequence[tuple[jax.Array | None, Pieces]]:
        """Return the weights of a step that begins at row `first`, as blocks (scales, pieces).

        The scales are f32[columns, 1], or None to scale nothing yet.
        """
        at = first + jnp.arange(deep, dtype=jnp.int32)
        if layout is not None:
            return four_bits.read(arrays, of_x, of_groups, column, first, order, layout, scaled, device)
        if rounded:
            return [(None, [(plgpu.load(weights.at[column[:, None], at[None, :]]), x, at)])]
        if dtype is None:
            return [(None, [(plgpu.load(weights.at[at[:, None], column[None, :]]), x, at)])]
        i = jnp.arange(deep // 4, dtype=jnp.int32)
        words = plgpu.load(weights.at[column[:, None], (lax.div(first, 4) + i)[None, :]])
        at = first + lax.div(i, QUARTER) * CHUNK + lax.rem(i, QUARTER)
        quarters = [(quarter, x, at + j * QUARTER) for j, quarter in enumerate(unpacked(words, dtype, device))]
        return [(None if at_end else scale_of(first), quarters)]

    def step(i: jax.Array, carry: Any) -> Any:
        sums, prefetched, of_groups = carry
        if ahead is not None:
            prefetched += prefetch(*next_weights, **ahead, now=i == share // deep - 1)

        def add(total: jax.Array, pieces: Pieces, row: jax.Array, full: bool) -> jax.Array:
            for piece, source, at in pieces:
                mask = None if full else jnp.broadcast_to((row < rows)[:, None], (row.size, at.size))
                nothing = None if full else jnp.zeros((), x.dtype)
                some = plgpu.load(source.at[row[:, None], at[None, :]], mask=mask, other=nothing)
                if rounded:
                    total += _dot_8_bits.dot(piece, some, device)
                else:
                    total += plgpu.dot(piece, some, trans_a=dtype is None and layout is None, trans_b=True)
            return total

        first = begin + i * deep
        following = scales_of_groups(first + deep)  # a step ahead, because so few are not copied to shared memory
        for of_block, pieces in read(first, of_groups):
            if of_block is None:
                sums = tuple(add(total, pieces, *some) for total, some in zip(sums, tiles, strict=True))
            else:
                products = [add(jnp.zeros_like(total), pieces, *some) for total, some in zip(sums, tiles, strict=True)]
                sums = tuple(added_product(*pair, of_block, device) for pair in zip(sums, products, strict=True))
        return sums, prefetched, following

    factors = [read_factors(of_rows[0], row, rows) for row, _ in tiles if of_rows]  # read before the weights
    sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    nothing = tuple(jnp.zeros((columns, row.size), sum_dtype) for row, _ in tiles)
    carry = nothing, jnp.int32(0), scales_of_groups(jnp.int32(begin))
    (*others, last), prefetched, _ = lax.fori_loop(0, share // deep, step, carry)
    if ahead is not None:
        last += prefetched.astype(sum_dtype)
    for i, ((row, _), result) in enumerate(zip(tiles, (*others, start_next(last, device)), strict=True)):
        result = result.astype(jnp.float32)
        if at_end:
            result *= scale_of(0)
        if layout is not None:
            result *= four_bits.divisor(layout, scaled)
        if of_rows:
            factor = jnp.sum(factors[i], axis=1)
            result *= (factor if rounded else lax.rsqrt(factor))[None, :]
        to: tuple[Any, ...] = (part, row[None, :], column[:, None])
        if gated is not None:
            gate, up = lax.split(result, (half, half))
            result = (activate(activation, gate) * up).astype(out.dtype)
            first = program * block + part * half
            to = row[None, :], (first + jnp.arange(half, dtype=jnp.int32))[:, None]
            for sums in sums_out:
                four_bits.store_sums(sums, row, result.astype(jnp.float32), first)
        plgpu.store(out.at[to], result, mask=jnp.broadcast_to((row < rows)[None, :], result.shape))


def read_factors(of_rows: Ref, row: jax.Array, rows: int) -> jax.Array:
    """Read the numbers from which the factors of some rows are computed, inside a kernel: f32[R, N].

    of_rows: f32[rows, _], these numbers of all rows. N is the second dimension rounded up to a power of two. The result
      is 0 where `of_rows` has no element.
    row: i32[R], indices of the rows.
    """
    piece = jnp.arange(pl.next_power_of_2(of_rows.shape[1]), dtype=jnp.int32)
    here = (row < rows)[:, None] & (piece < of_rows.shape[1])[None, :]
    return plgpu.load(of_rows.at[row[:, None], piece[None, :]], mask=here, other=0)


def added_product(total: jax.Array, product: jax.Array, factor: jax.Array, device: Device) -> jax.Array:
    """Return total + product * factor, inside a kernel. Triton would multiply and add in two instructions.

    total, product: f32[M, N].
    factor: f32[M, 1].
    """
    if device.interpret:
        return total + product * factor
    (result,) = plgpu.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[product, jnp.broadcast_to(factor, total.shape), total],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return result

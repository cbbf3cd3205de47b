"""GPU kernels for a few rows: the product of x with a weight matrix, and the sum and norm between two such products.

Each weight is read once. The weights are the left operand of the matrix units. A matrix unit takes 64 columns of
weights straight from shared memory, together with the rows of x. The rows of x are padded to a multiple of 16, and
divided into tiles whose numbers of rows are powers of two. If the weights were the right operand, each weight would
pass through registers first. Weights in 4 bits pass through registers in any case. With up to 8 rows of x they are
multiplied by the older matrix units, which take 8 rows at a time and need no fence.

The depth (the dimension that is summed over) is split until there are enough programs (blocks of the kernel's grid).
The partial sums, f32[splits, rows, width], are left for the next kernel to add up. So a product, the sum
of its parts, the addition to x and the norm of the result take two kernels instead of three or four.

A matrix in 8 bits (`weights/interleaved.py`) is read as words of four values, which are converted to bfloat16 in
registers. A matrix in 4 bits (`weights/interleaved_grouped.py`) is read as words of eight. Scales of outputs are
applied to the sums at the end, scales of blocks and groups to the product with each block or group. If
activations are rounded to 8 bits, too, the matrix units multiply 8-bit numbers with each other, and nothing is
converted.

Both kernels let the next kernel start early (see `_overlap`): `product` once its last weights have arrived,
`add_and_norm` at its start. Before `product` waits for its last weights, it also prefetches the first weights of the
next product. One row and small matrices are for `_split_product`. Many rows and the largest matrices are left to XLA's
own products (see docs/notes/gpu.md).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import _dot_8_bits
from pallas_kernels._overlap import WARPS, prefetch, start_next
from pallas_kernels._round_rows import round_rows, store_rounded
from pallas_kernels._split_product import activate, added
from pallas_kernels._tiling import (
    COLUMNS,
    MIN_ROWS,
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
from pallas_kernels.weights import AnyWeight, Summed
from pallas_kernels.weights import interleaved_grouped as four_bits
from pallas_kernels.weights.grouped import Layout
from pallas_kernels.weights.interleaved import CHUNK, QUARTER, Interleaved, unpacked
from pallas_kernels.weights.interleaved_grouped import InterleavedGrouped
from pallas_kernels.weights.scaled import Scaled

WIDE = 4096  # least width of x for which `add_and_norm` has 32 warps instead of 16
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
        parts, stride = tiling(rows, then, gated=False).splits, values.shape[1]
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
        `round_rows`; for weights that have offsets, a `Summed`.
      weights: [depth, width], for which `covers` returns True.
      gated: (activation, block) if the weights are those of gate and up: `block` columns of gate and `block` columns of
        up in turn. The result is then activation(gate) * up, [rows, width / 2] in the weights' dtype, as a `Summed` if
        the product with `then` reads one. None for other weights.
      then: the matrix of the next product, whose first rows are prefetched; or None.
      device: the device that the program is compiled for.
    """
    depth, width = weights.shape
    rows = jax.tree.leaves(x)[0].shape[0]
    tile = tiling(rows, weights, gated=gated is not None)
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
    inputs: list[jax.Array] = [x]
    arrays: list[jax.Array] = [weights]
    if isinstance(weights, Interleaved):
        dtype = weights.values.dtype
        words = lax.bitcast_convert_type(weights.values.reshape(width, depth // 4, 4), jnp.int32)
        arrays = [words, weights.scale]
    elif isinstance(weights, InterleavedGrouped):
        layout, arrays = weights.layout, weights.arrays()
        if layout.offset:
            inputs = [*(x if isinstance(x, Summed) else four_bits.summed(x))]
    elif isinstance(weights, Scaled):
        inputs = [*(x if isinstance(x, tuple) else round_rows(x, weights.values.dtype.name, device=device))]
        inputs[1] = inputs[1][:, 0]
        arrays = [weights.values, weights.of_outputs()[:, None]]
    next_weights, ahead = prefetch_options(then, rows, math.prod(grid), device)
    result: list[jax.Array] = pl.pallas_call(
        functools.partial(
            _product,
            counts=(len(inputs), len(arrays), len(next_weights)),
            dtype=dtype,
            layout=layout,
            rounded=layout is None and len(inputs) > 1,
            gated=gated,
            tile=tile,
            ahead=ahead,
            device=device,
        ),
        grid=grid,
        in_specs=[*(whole(array.shape) for array in (*inputs, *arrays)), *(whole((1, 1)) for _ in next_weights)],
        out_specs=[whole(array.shape) for array in out],
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=tile.stages),
        interpret=device.interpret,
        name="product",
    )(*inputs, *arrays, *next_weights)
    return Summed(*result) if len(result) > 1 else result[0]


def sums_for(weight: Any, rows: int, device: Device) -> bool:
    """Return whether the kernel for the product of so many rows with `weight` reads `Summed`."""
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

    refs: references to x, as one or two arrays; the arrays of the matrix; those to prefetch; and the results.
    counts: numbers of the first three.
    dtype: dtype of 8-bit weights that are given as words; None for others.
    layout: layout of 4-bit weights; None for others.
    rounded: whether weights and x are 8-bit numbers, and the scale of each row of x is given, too.
    """
    columns, deep = tile.columns, tile.deep
    of_x, arrays, next_weights, (out, *sums_out) = (
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

    order = four_bits.order(arrays) if layout is not None and layout.offset else None

    def scale_of(first: Any) -> jax.Array:
        """Return the scales f32[columns, 1] of the block of 8-bit weights that begins at row `first`."""
        column_blocks, row_blocks = scale.shape
        block = lax.div(column, weights.shape[0] // column_blocks)
        of_block = plgpu.load(scale.at[block, lax.div(first, depth // row_blocks)])[:, None]
        return of_block * 64.0 if dtype == jnp.int8 else of_block  # `unpacked` divides integers by 64

    def scales_of_groups(first: jax.Array) -> list[jax.Array]:
        """Return the scales of the groups of 4-bit weights in the step that begins at row `first`."""
        return four_bits.of_groups(scale, depth, column, first) if layout is not None else []

    def read(first: jax.Array, of_groups: list[jax.Array]) -> Sequence[tuple[jax.Array | None, Pieces]]:
        """Return the weights of a step that begins at row `first`, as blocks (scales, pieces).

        The scales are f32[columns, 1], or None to scale nothing yet.
        """
        at = first + jnp.arange(deep, dtype=jnp.int32)
        if layout is not None:
            return four_bits.read(arrays, of_x, of_groups, column, first, order, layout, device)
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

    sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    nothing = tuple(jnp.zeros((columns, row.size), sum_dtype) for row, _ in tiles)
    carry = nothing, jnp.int32(0), scales_of_groups(jnp.int32(begin))
    (*others, last), prefetched, _ = lax.fori_loop(0, share // deep, step, carry)
    if ahead is not None:
        last += prefetched.astype(sum_dtype)
    for (row, _), result in zip(tiles, (*others, start_next(last, device)), strict=True):
        result = result.astype(jnp.float32)
        if at_end:
            result *= scale_of(0)
        if layout is not None:
            result *= four_bits.divisor(layout)
        if rounded:
            result *= plgpu.load(of_x[1].at[row], mask=row < rows, other=0)[None, :]
        to: tuple[Any, ...] = (part, row[None, :], column[:, None])
        if gated is not None:
            gate, up = lax.split(result, (half, half))
            result = (activate(activation, gate) * up).astype(out.dtype)
            first = program * block + part * half
            to = row[None, :], (first + jnp.arange(half, dtype=jnp.int32))[:, None]
            for sums in sums_out:
                four_bits.store_sums(sums, row, result.astype(jnp.float32), first)
        plgpu.store(out.at[to], result, mask=jnp.broadcast_to((row < rows)[None, :], result.shape))


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
    summed: whether the second result is a `Summed`.
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
    y = added([load(x, row), *(load(parts, jnp.int32(part), row) for part in range(parts.shape[0]))]).astype(out.dtype)
    store_normed(y, weight, row, at, here, out, *normed, eps=eps, device=device)


def row_reads(width: int) -> tuple[jax.Array, jax.Array, Callable[..., jax.Array]]:
    """Return what reads whole rows of `width` elements inside a kernel.

    Returns: the places i32[N] of a row, padded to a power of two; bool[N], whether the row has such a place; and a
      function of an array and the indices of a row that reads the row as f32[N], 0 in the padding.
    """
    at = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    here = at < width

    def load(ref: Ref, *index: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[(*index, at)], mask=here, other=0).astype(jnp.float32)

    return at, here, load


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
      or the parts of a `Summed`.
    """
    plgpu.store(out.at[row, at], y, mask=here)
    y = y.astype(jnp.float32)
    y *= lax.rsqrt(jnp.sum(y * y) / out.shape[1] + eps) * weight
    if normed[0].dtype != out.dtype:
        return store_rounded(y.astype(out.dtype), row, at, here, *normed, device=device)
    rounded = y.astype(out.dtype)
    plgpu.store(normed[0].at[row, at], rounded, mask=here)
    for sums in normed[1:]:
        four_bits.store_sums(sums, row, rounded.astype(jnp.float32), 0)

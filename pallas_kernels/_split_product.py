"""On GPU: few rows against a matrix that is read once, the depth split over programs, the sums left to the reader.

A program reads [depth / splits, columns] of the weights, whole memory lines, all of it under way at once, and leaves a
partial sum. Whoever reads the product adds the parts up: the next kernel, on its way into its own product. So a decoder
layer needs no kernel that only adds, norms or activates. An RMSNorm multiplies the rows by its scale here, and by
1 / rms where the parts are added up, from the partial sums of squares that are left beside them.
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

MAX_ROWS = 32
STEP = 64  # rows of weights in one product


@dataclasses.dataclass(frozen=True)
class Tile:
    """columns and splits: how the matrix is cut; ahead: steps whose reads are under way together; few: rows one by one
    on the vector units, instead of together on the matrix units, which have at least 16."""

    columns: int
    splits: int
    ahead: int = 4
    warps: int = 8
    few: bool = False


@dataclasses.dataclass(frozen=True)
class Parts:
    """A product in parts f32[splits, rows, width]; squares f32[splits, rows] where a norm's 1 / rms is still due."""

    sums: jax.Array
    squares: jax.Array | None = None


def fits(x, *weights) -> bool:
    """The shapes that the kernel covers and is meant for."""
    rows = math.prod(x.shape[:-1])
    even = all(w.dtype == x.dtype and w.shape[0] % STEP == 0 and w.shape[1] % 64 == 0 for w in weights)
    return x.dtype == jnp.bfloat16 and 0 < rows <= MAX_ROWS and even


def choose_tile(depth: int, width: int, rows: int) -> Tile:
    columns = 128 if width % 128 == 0 and width > 2048 else 64
    steps, blocks = depth // STEP, width // columns
    wanted = 128 if depth * width <= 2**24 else 256
    splits = min(d for d in range(1, steps + 1) if steps % d == 0 and (d * blocks >= wanted or d == steps))
    return Tile(columns, splits, few=rows <= 2)


def split_product(
    x, weights, *, norm=None, parts=None, gated=None, finish=None, zeros=0, eps=0.0, tile=None, interpret=False
):
    """x [rows, depth] @ weights in parts, and what else the options ask for, as a dict.

    norm: x is normed by this scale. parts: x is x + these first, and the result has it as "x". gated: (parts, width of
    the norm, activation, block): x is None, and becomes activation(gate) * up of these. finish: (residual, counts): the
    program that ends last for some columns adds up the parts and the residual into "out". zeros: "zeros" i32[zeros].
    """
    depth, width = weights.shape
    rows = x.shape[0] if x is not None else gated[0].sums.shape[1]
    tile = tile or choose_tile(depth, width, rows)
    block_rows = rows if tile.few else max(pl.next_power_of_2(rows), 16)
    operands = {"x": x, "weights": weights, "norm": norm}
    activation = None
    if parts is not None:
        operands["more"] = parts.sums
    if gated is not None:
        gate, norm_width, activation, block = gated
        operands |= {"gate": gate.sums, "gate_squares": gate.squares}
    if finish is not None:
        operands |= {"residual": finish[0], "old_counts": finish[1]}
    operands = {name: value for name, value in operands.items() if value is not None}
    shape = jax.ShapeDtypeStruct
    outputs = {"sums": shape((tile.splits, rows, width), jnp.float32)}
    if norm is not None:
        outputs["squares"] = shape((tile.splits, rows), jnp.float32)
    if parts is not None:
        outputs["new_x"] = shape((rows, depth), x.dtype)
    aliases = {}
    if finish is not None:
        aliases = {list(operands).index("old_counts"): len(outputs)}
        outputs |= {"counts": shape(finish[1].shape, jnp.int32), "out": shape((rows, width), weights.dtype)}
    if zeros:
        outputs["zeros"] = shape((zeros,), jnp.int32)
    results = pl.pallas_call(
        functools.partial(
            _kernel, names=(*operands, *outputs), tile=tile, block_rows=block_rows, eps=eps, activation=activation,
            block=gated and block, norm_width=gated and norm_width, barrier=not interpret,
        ),
        grid=(width // tile.columns, tile.splits),
        out_shape=list(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="split_product",
    )(*operands.values())  # fmt: skip
    named = dict(zip(outputs, results, strict=True))
    return {"parts": Parts(named["sums"], named.get("squares")), **named}


def _kernel(*refs, names, tile, block_rows, eps, activation, block, norm_width, barrier):
    ref = dict(zip(names, refs, strict=True))
    weights, sums = ref["weights"], ref["sums"]
    rows, depth = sums.shape[1], weights.shape[0]
    steps = depth // STEP // tile.splits  # of this program
    ahead = math.gcd(tile.ahead, steps)
    column_block, split = pl.program_id(0), pl.program_id(1)
    column = column_block * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
    dtype = weights.dtype
    # A line is one row, or all of them as a column.
    row = jnp.arange(block_rows, dtype=jnp.int32)
    lines: list[Any] = [jnp.int32(i) for i in range(rows)] if tile.few else [row[:, None]]
    across = (lambda x: x) if tile.few else (lambda x: x[None, :])

    def load(array, *index):
        if tile.few:
            return plgpu.load(array.at[index]).astype(jnp.float32)
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
        mask = jnp.broadcast_to((row < rows)[:, None], shape)
        return plgpu.load(array.at[index], mask=mask, other=0).astype(jnp.float32)

    def store(array, *index, value, where=None):
        shape = jnp.shape(value)
        mask = None if tile.few else jnp.broadcast_to((row < rows)[:, None], shape)
        if where is not None:
            where = jnp.broadcast_to(where, shape)
            mask = where if mask is None else mask & where
        plgpu.store(array.at[index], value, mask=mask)

    def gather(array, line, at):
        """The sum of parts."""
        return sum(load(array, jnp.int32(s), line, at) for s in range(array.shape[0]))

    def source(line, first, squares):
        """The line's numbers first, first + 1, ... as they go into the product; its squares added to `squares`."""
        offset = jnp.arange(STEP, dtype=jnp.int32)
        if activation is not None:
            start = lax.div(first, block) * (2 * block) + lax.rem(first, block)
            gate, up = (gather(ref["gate"], line, across(start + shift + offset)) for shift in (0, block))
            if "gate_squares" in ref:
                total = sum(load(ref["gate_squares"], jnp.int32(s), line) for s in range(ref["gate"].shape[0]))
                shrink = lax.rsqrt(total / norm_width + eps)
                gate, up = gate * shrink, up * shrink
            return _activate(activation, gate) * up, squares
        at = across(first + offset)
        h = load(ref["x"], line, at)
        if "more" in ref:
            new_x = (h + gather(ref["more"], line, at)).astype(dtype)
            store(ref["new_x"], line, at, value=new_x, where=column_block == 0)
            h = new_x.astype(jnp.float32)
        if "norm" in ref:
            squares, h = squares + h * h, h * across(plgpu.load(ref["norm"].at[first + offset]))
        return h, squares

    def body(i, carry):
        firsts = [((split * steps) + i * ahead + j) * STEP for j in range(ahead)]
        offset = jnp.arange(STEP, dtype=jnp.int32)
        tiles = [plgpu.load(weights.at[(first + offset)[:, None], column[None, :]]) for first in firsts]
        for first, w in zip(firsts, tiles, strict=True):
            new = []
            for line, (total, squares) in zip(lines, carry, strict=True):
                h, squares = source(line, first, squares)
                if tile.few:
                    total += w.astype(jnp.float32) * h[:, None]
                else:
                    total += plgpu.dot(h.astype(dtype), w)
                new.append((total, squares))
            carry = new
        return carry

    zero = jnp.zeros((STEP if tile.few else block_rows, tile.columns), jnp.float32)
    squares = jnp.zeros((STEP,) if tile.few else (block_rows, STEP), jnp.float32)
    carry = [(zero, squares) for _ in lines]
    carry = body(0, carry) if steps == ahead else lax.fori_loop(0, steps // ahead, body, carry)
    for line, (total, squares) in zip(lines, carry, strict=True):
        store(sums, split, line, across(column), value=jnp.sum(total, axis=0) if tile.few else total)
        if "norm" in ref:
            value = jnp.sum(squares) if tile.few else jnp.sum(squares, axis=1)[:, None]
            if tile.few:
                plgpu.store(ref["squares"].at[split, line], value)
            else:
                store(ref["squares"], split, line, value=value)

    if "zeros" in ref:
        size = pl.next_power_of_2(ref["zeros"].shape[0])
        at = jnp.arange(size, dtype=jnp.int32)
        mask = (at < ref["zeros"].shape[0]) & (column_block + split == 0)
        plgpu.store(ref["zeros"].at[at], jnp.zeros(size, jnp.int32), mask=mask)

    if "out" in ref:
        if barrier:  # all of this program's numbers are out before it is counted
            plgpu.debug_barrier()
        before = plgpu.atomic_add(ref["counts"], (column_block,), jnp.int32(1))

        @pl.when(before == tile.splits - 1)
        def _finish():
            for line in lines:
                y = load(ref["residual"], line, across(column)) + gather(sums, line, across(column))
                store(ref["out"], line, across(column), value=y.astype(dtype))


def _activate(kind, x):
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x / (1 + jnp.exp(-x))

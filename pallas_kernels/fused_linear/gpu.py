"""fused_linear on GPU: few rows against a matrix, read once. One program computes some columns over the whole depth.

The norm costs no pass of its own: rows are multiplied by its scale on their way into the product, and the product by
1 / rms, whose sum of squares is gathered along the way.
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

MIN_ROWS, MAX_ROWS = 16, 128  # rows of a program; beyond MAX_ROWS a library's product is as fast


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a program reads at a time, [depth, columns] of the weights, by how many warps, how many times ahead."""

    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    swap: bool = False  # the weights as the left operand


def fits(x, weights, activation, block) -> bool:
    """The shapes that the kernel covers and is meant for."""
    (depth, width), rows = weights.shape, math.prod(x.shape[:-1])
    narrow = activation is not None and (block < 16 or block & (block - 1))
    same = x.dtype == weights.dtype == jnp.bfloat16
    return same and 0 < rows <= MAX_ROWS and depth % 64 == 0 and width % 16 == 0 and not narrow


def choose_tile(depth: int, width: int, rows: int, gated: bool) -> Tile:
    """depth, width of the weights."""
    columns = 32 if width >= 2048 else 16
    return Tile(columns=columns, depth=128, warps=4, stages=4)


def fused_linear(x, weights, norm, bias, residual, *, eps, activation, block, zeros=0, tile=None, interpret=False):
    """zeros: how many zeros i32 to leave as a second result, for the next kernel to count its programs with."""
    *lead, depth = x.shape
    rows, gated = math.prod(lead), activation is not None
    width = weights.shape[1] // (2 if gated else 1)
    tile = tile or choose_tile(*weights.shape, rows, gated)
    columns = min(tile.columns, block) if gated else tile.columns
    step = math.gcd(depth, tile.depth)
    block_rows = min(max(pl.next_power_of_2(rows), MIN_ROWS), MAX_ROWS)
    operands = {"x": x.reshape(rows, depth), "weights": weights, "norm": norm, "bias": bias}
    operands["residual"] = None if residual is None else residual.reshape(rows, width)
    operands = {name: value for name, value in operands.items() if value is not None}
    outputs = {"out": jax.ShapeDtypeStruct((rows, width), x.dtype)}
    if zeros:
        outputs["zeros"] = jax.ShapeDtypeStruct((zeros,), jnp.int32)
    out, *rest = pl.pallas_call(
        functools.partial(
            _kernel, names=(*operands, *outputs), columns=columns, step=step, block_rows=block_rows,
            eps=eps, activation=activation, block=block, swap=tile.swap,
        ),
        grid=(pl.cdiv(width, columns), pl.cdiv(rows, block_rows)),
        out_shape=list(outputs.values()),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="fused_linear",
    )(*operands.values())  # fmt: skip
    out = out.reshape(*lead, width)
    return (out, *rest) if zeros else out


def _kernel(*refs, names, columns, step, block_rows, eps, activation, block, swap):
    ref = dict(zip(names, refs, strict=True))
    x, weights, out = ref["x"], ref["weights"], ref["out"]
    (rows, depth), width = x.shape, out.shape[1]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    first = pl.program_id(0) * columns
    row = pl.program_id(1) * block_rows + jnp.arange(block_rows, dtype=jnp.int32)
    column = first + jnp.arange(columns, dtype=jnp.int32)
    here = (row < rows)[:, None]
    if width % columns:
        here &= (column < width)[None, :]
    starts = [first]
    if activation is not None:  # a block of gate columns, then as many up columns
        starts = [first // block * (2 * block) + first % block]
        starts.append(starts[0] + block)

    def product(h, at, start):
        from_column = start + jnp.arange(columns, dtype=jnp.int32)
        mask = (
            None
            if width % columns == 0
            else jnp.broadcast_to((from_column < weights.shape[1])[None, :], (step, columns))
        )
        other = None if mask is None else 0
        w = plgpu.load(weights.at[at[:, None], from_column[None, :]], mask=mask, other=other)
        if swap:
            return plgpu.dot(w, h, trans_a=True, trans_b=True, precision=precision)
        return plgpu.dot(h, w, precision=precision)

    def body(i, carry):
        sums, *squares = carry
        at = i * step + jnp.arange(step, dtype=jnp.int32)
        h = plgpu.load(x.at[row[:, None], at[None, :]], mask=(row < rows)[:, None], other=0)
        if squares:
            wide = h.astype(jnp.float32)
            squares = [squares[0] + wide * wide]
            h = (wide * plgpu.load(ref["norm"].at[at])[None, :]).astype(h.dtype)
        return tuple(s + product(h, at, start) for s, start in zip(sums, starts, strict=True)), *squares

    shape = (columns, block_rows) if swap else (block_rows, columns)
    squares = [jnp.zeros((block_rows, step), jnp.float32)] if "norm" in ref else []
    start = (tuple(jnp.zeros(shape, jnp.float32) for _ in starts), *squares)
    sums, *squares = lax.fori_loop(0, depth // step, body, start)
    if swap:
        sums = [s.T for s in sums]
    if squares:
        scale = lax.rsqrt(jnp.sum(squares[0], axis=1) / depth + eps)[:, None]
        sums = [s * scale for s in sums]
    y = sums[0]
    if "bias" in ref:
        y += plgpu.load(ref["bias"].at[column])[None, :].astype(jnp.float32)
    if activation is not None:
        y = _activate(activation, y) * sums[1]
    if "residual" in ref:
        y += plgpu.load(ref["residual"].at[row[:, None], column[None, :]], mask=here, other=0).astype(jnp.float32)
    plgpu.store(out.at[row[:, None], column[None, :]], y.astype(out.dtype), mask=here)
    if "zeros" in ref:
        size = pl.next_power_of_2(ref["zeros"].shape[0])
        at = jnp.arange(size, dtype=jnp.int32)
        mask = (at < ref["zeros"].shape[0]) & (pl.program_id(0) + pl.program_id(1) == 0)
        plgpu.store(ref["zeros"].at[at], jnp.zeros(size, jnp.int32), mask=mask)


def _activate(kind, x):
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x / (1 + jnp.exp(-x))

"""On GPU: few rows against a matrix that is read once, the depth split over programs, the sums left to the reader.

A program has all its reads under way at once, the parts of x and [depth / splits, columns] of the weights, and leaves a
partial sum. Whoever reads the product adds the parts up: the next kernel, on its way into its own product. So half a
decoder layer needs no kernel that only adds, norms or activates. An RMSNorm multiplies a row by its scale here, and
by 1 / rms where the parts are added up, from the partial sums of squares that are left beside them.

Small matrices are read in the time that starting some kernels takes, so that fewer kernels is what counts. With more
rows, or larger matrices, the compiler's own products are faster (see jaxspec/bench/NOTES.md).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MAX_ROWS = 1  # two are built, and await their measurement
STEP, MAX_STEP = 64, 256  # rows of weights in one read, at least and at most
MAX_SHARE = 1 << 15  # numbers that a program reads for one row: they all have to fit into its registers
MAX_SIZE = 1 << 24  # of a matrix


@dataclasses.dataclass(frozen=True)
class Parts:
    """A product in parts, f32[splits, rows, width]; squares f32[splits, rows] where a norm's 1 / rms is still due."""

    sums: jax.Array
    squares: jax.Array | None = None


def covers(rows, *weights) -> bool:
    """The products that the kernel covers and is meant for."""
    covered = lambda w: w.shape[0] % STEP == 0 and w.shape[1] % 64 == 0 and w.size < MAX_SIZE
    return rows <= MAX_ROWS and all(map(covered, weights))


def tile(depth: int, width: int, rows: int) -> tuple[int, int]:
    """(columns of a program, splits of the depth): a program a multiprocessor, a few where there is more to read."""
    columns = 128 if width % 128 == 0 and width > 2048 else 64
    steps, blocks = depth // STEP, width // columns
    wanted = 200 if depth > 2048 or width > 4096 else 128
    enough = lambda d: d * blocks >= wanted and depth // d * columns <= MAX_SHARE // rows
    return columns, min(d for d in range(1, steps + 1) if steps % d == 0 and (enough(d) or d == steps))


def split_product(x, weights, *, norm=None, parts=None, gated=None, finish=None, zeros=0, eps=0.0, interpret=False):
    """x [rows, depth] @ weights in Parts, and what else the options ask for, as a dict.

    norm: x is normed by this scale. parts: x is x + these first, and the result has it as "new_x". gated: (Parts,
    activation, block, width of their norm): x is None, and becomes activation(gate) * up of these. finish: (residual,
    counts): the program that ends last for some columns adds up the parts and the residual into "out". zeros: the
    result has so many, as "zeros", for a later kernel to count its programs with.
    """
    depth, width = weights.shape
    rows = x.shape[0] if gated is None else gated[0].sums.shape[1]
    columns, splits = tile(depth, width, rows)
    operands = {"x": x, "weights": weights, "norm": norm}
    activation = block = norm_width = None
    if parts is not None:
        operands["more"] = parts.sums
    if gated is not None:
        gate, activation, block, norm_width = gated
        operands |= {"gate": gate.sums, "gate_squares": gate.squares}
    if finish is not None:
        operands["residual"], operands["old_counts"] = finish
    operands = {name: value for name, value in operands.items() if value is not None}
    shape = jax.ShapeDtypeStruct
    outputs = {"sums": shape((splits, rows, width), jnp.float32)}
    aliases = {}
    if norm is not None:
        outputs["squares"] = shape((splits, rows), jnp.float32)
    if parts is not None:
        outputs["new_x"] = shape((rows, depth), x.dtype)
    if finish is not None:
        aliases = {list(operands).index("old_counts"): len(outputs)}
        outputs |= {"counts": shape(finish[1].shape, jnp.int32), "out": shape((rows, width), weights.dtype)}
    if zeros:
        outputs["zeros"] = shape((zeros,), jnp.int32)
    results = pl.pallas_call(
        functools.partial(
            _kernel, names=(*operands, *outputs), columns=columns, splits=splits, eps=eps, activation=activation,
            block=block, norm_width=norm_width, barrier=not interpret,
        ),
        grid=(width // columns, splits),
        out_shape=list(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="split_product",
    )(*operands.values())  # fmt: skip
    named = dict(zip(outputs, results, strict=True))
    return {"parts": Parts(named["sums"], named.get("squares")), **named}


def _kernel(*refs, names, columns, splits, eps, activation, block, norm_width, barrier):
    ref = dict(zip(names, refs, strict=True))
    weights, sums = ref["weights"], ref["sums"]
    depth = weights.shape[0] // splits  # of this program
    size = math.gcd(depth, MAX_STEP, block or MAX_STEP)  # of a read
    column_block, split = pl.program_id(0), pl.program_id(1)
    column = column_block * columns + jnp.arange(columns, dtype=jnp.int32)
    firsts = [split * depth + at for at in range(0, depth, size)]
    at = jnp.arange(size, dtype=jnp.int32)
    rows = range(sums.shape[1])  # as indices jnp.int32: the interpreter takes no plain numbers

    def parts(array, row, at):
        """Parts [their number, at] of a row under way; whoever needs them adds them up."""
        part = jnp.arange(pl.next_power_of_2(array.shape[0]), dtype=jnp.int32)
        mask = jnp.broadcast_to((part < array.shape[0])[:, None], (part.shape[0], at.shape[0]))
        return plgpu.load(array.at[part[:, None], jnp.int32(row), at[None, :]], mask=mask, other=0)

    def start_reading(row, first):
        """What x [row, first : first + size] is made of, under way."""
        if activation is not None:  # "//" would hide that the columns stay aligned
            gate = lax.div(first, block) * (2 * block) + lax.rem(first, block)
            return [parts(ref["gate"], row, gate + shift + at) for shift in (0, block)]
        x = plgpu.load(ref["x"].at[jnp.int32(row), first + at])
        return [x, *([parts(ref["more"], row, first + at)] if "more" in ref else [])]

    def source(row, first, read):
        """x [row, first : first + size], before its norm."""
        if activation is not None:
            gate, up = (jnp.sum(part, axis=0) * shrink[row] for part in read)
            return _activate(activation, gate) * up
        x = read[0].astype(jnp.float32)
        if "more" not in ref:
            return x
        x = (x + jnp.sum(read[1], axis=0)).astype(weights.dtype)
        mask = jnp.broadcast_to(column_block == 0, x.shape)
        plgpu.store(ref["new_x"].at[jnp.int32(row), first + at], x, mask=mask)
        return x.astype(jnp.float32)

    # All reads are under way before the first is waited for, those of x, which are small, before the weights.
    if activation is not None:
        load = lambda part, row: plgpu.load(ref["gate_squares"].at[jnp.int32(part), jnp.int32(row)])
        gate_squares = [[load(part, row) for part in range(ref["gate_squares"].shape[0])] for row in rows]
    reads = [[start_reading(row, first) for row in rows] for first in firsts]
    scales = [plgpu.load(ref["norm"].at[first + at]) if "norm" in ref else None for first in firsts]
    tiles = [plgpu.load(weights.at[(first + at)[:, None], column[None, :]]) for first in firsts]
    if activation is not None:
        shrink = [lax.rsqrt(sum(squares) / norm_width + eps) for squares in gate_squares]
    products, squares = [0] * len(rows), [0] * len(rows)
    for first, read, scale, tile in zip(firsts, reads, scales, tiles, strict=True):
        tile = tile.astype(jnp.float32)
        for row in rows:  # the inner loop: as the outer one it would keep whole tiles of float32 in registers
            h = source(row, first, read[row])
            if scale is not None:
                squares[row] += h * h
                h *= scale
            products[row] += tile * h[:, None]
    for row in rows:
        plgpu.store(sums.at[split, jnp.int32(row), column], jnp.sum(products[row], axis=0))
        if "norm" in ref:
            plgpu.store(ref["squares"].at[split, jnp.int32(row)], jnp.sum(squares[row]))
    if "zeros" in ref:
        at = jnp.arange(pl.next_power_of_2(ref["zeros"].shape[0]), dtype=jnp.int32)
        mask = (at < ref["zeros"].shape[0]) & (column_block + split == 0)
        plgpu.store(ref["zeros"].at[at], jnp.zeros_like(at), mask=mask)
    if "out" in ref:
        if barrier:  # all of this program's numbers are out before it is counted
            plgpu.debug_barrier()
        before = plgpu.atomic_add(ref["counts"], (column_block,), jnp.int32(1))

        @pl.when(before == splits - 1)
        def _finish():
            for row in rows:
                at = jnp.int32(row), column
                y = plgpu.load(ref["residual"].at[at]).astype(jnp.float32) + jnp.sum(parts(sums, row, column), axis=0)
                plgpu.store(ref["out"].at[at], y.astype(weights.dtype))


def _activate(kind, x):
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x / (1 + jnp.exp(-x))

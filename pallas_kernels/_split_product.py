"""On GPU: one row against a matrix that is read once, the depth split over programs, the sums left to the reader.

A program reads [depth / splits, columns] of the weights, whole memory lines, many of them under way at once, and leaves
a partial sum. Whoever reads the product adds the parts up: the next kernel, on its way into its own product. So half a
decoder layer needs no kernel that only adds, norms or activates. An RMSNorm multiplies the row by its scale here, and
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

STEP = 64  # rows of weights in one read
AHEAD = 4  # reads under way at a time, at most
MAX_SIZE = 1 << 24  # of a matrix


@dataclasses.dataclass(frozen=True)
class Parts:
    """A row's product in parts, f32[splits, width]; squares f32[splits] where a norm's 1 / rms is still due."""

    sums: jax.Array
    squares: jax.Array | None = None


def fits(x, *weights) -> bool:
    """The shapes that the kernel covers and is meant for."""
    small = all(w.shape[0] % STEP == 0 and w.shape[1] % 64 == 0 and w.size < MAX_SIZE for w in weights)
    return math.prod(x.shape[:-1]) == 1 and x.dtype == jnp.bfloat16 and small


def tile(depth: int, width: int) -> tuple[int, int]:
    """(columns of a program, splits of the depth): about one program a multiprocessor, with little to read each."""
    columns = 128 if width % 128 == 0 and width > 2048 else 64
    steps, blocks = depth // STEP, width // columns
    wanted = 200 if depth > 2048 else 128
    return columns, min(d for d in range(1, steps + 1) if steps % d == 0 and (d * blocks >= wanted or d == steps))


def split_product(x, weights, *, norm=None, parts=None, gated=None, finish=None, zeros=0, eps=0.0, interpret=False):
    """x [depth] @ weights in Parts, and what else the options ask for, as a dict.

    norm: x is normed by this scale. parts: x is x + these first, and the result has it as "new_x". gated: (Parts,
    activation, block, width of their norm): x is None, and becomes activation(gate) * up of these. finish: (residual,
    counts): the program that ends last for some columns adds up the parts and the residual into "out". zeros: the
    result has so many, as "zeros", for a later kernel to count its programs with.
    """
    depth, width = weights.shape
    columns, splits = tile(depth, width)
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
    outputs = {"sums": shape((splits, width), jnp.float32)}
    aliases = {}
    if norm is not None:
        outputs["squares"] = shape((splits,), jnp.float32)
    if parts is not None:
        outputs["new_x"] = shape((depth,), x.dtype)
    if finish is not None:
        aliases = {list(operands).index("old_counts"): len(outputs)}
        outputs |= {"counts": shape(finish[1].shape, jnp.int32), "out": shape((width,), weights.dtype)}
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
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="split_product",
    )(*operands.values())  # fmt: skip
    named = dict(zip(outputs, results, strict=True))
    return {"parts": Parts(named["sums"], named.get("squares")), **named}


def _kernel(*refs, names, columns, splits, eps, activation, block, norm_width, barrier):
    ref = dict(zip(names, refs, strict=True))
    weights, sums = ref["weights"], ref["sums"]
    steps = weights.shape[0] // STEP // splits  # of this program
    ahead = math.gcd(AHEAD, steps) if steps % 3 else 3
    column_block, split = pl.program_id(0), pl.program_id(1)
    column = column_block * columns + jnp.arange(columns, dtype=jnp.int32)
    offset = jnp.arange(STEP, dtype=jnp.int32)

    def gather(array, *at):
        """The sum of parts."""
        return sum(plgpu.load(array.at[(jnp.int32(part), *at)]) for part in range(array.shape[0]))

    def source(first, squares):
        """x [first : first + STEP] as it goes into the product, and its squares added to `squares`."""
        if activation is not None:  # "//" would hide that the columns stay aligned
            start = lax.div(first, block) * (2 * block) + lax.rem(first, block)
            shrink = lax.rsqrt(gather(ref["gate_squares"]) / norm_width + eps)
            gate, up = (gather(ref["gate"], start + shift + offset) * shrink for shift in (0, block))
            return _activate(activation, gate) * up, squares
        h = plgpu.load(ref["x"].at[first + offset]).astype(jnp.float32)
        if "more" in ref:
            x = (h + gather(ref["more"], first + offset)).astype(weights.dtype)
            mask = jnp.broadcast_to(column_block == 0, x.shape)
            plgpu.store(ref["new_x"].at[first + offset], x, mask=mask)
            h = x.astype(jnp.float32)
        if "norm" in ref:
            squares, h = squares + h * h, h * plgpu.load(ref["norm"].at[first + offset])
        return h, squares

    def body(i, carry):
        total, squares = carry
        firsts = [(split * steps + i * ahead + j) * STEP for j in range(ahead)]
        tiles = [plgpu.load(weights.at[(first + offset)[:, None], column[None, :]]) for first in firsts]
        for first, w in zip(firsts, tiles, strict=True):
            h, squares = source(first, squares)
            total += w.astype(jnp.float32) * h[:, None]
        return total, squares

    carry = jnp.zeros((STEP, columns), jnp.float32), jnp.zeros(STEP, jnp.float32)
    total, squares = body(0, carry) if steps == ahead else lax.fori_loop(0, steps // ahead, body, carry)
    plgpu.store(sums.at[split, column], jnp.sum(total, axis=0))
    if "norm" in ref:
        plgpu.store(ref["squares"].at[split], jnp.sum(squares))
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
            y = plgpu.load(ref["residual"].at[column]).astype(jnp.float32) + gather(sums, column)
            plgpu.store(ref["out"].at[column], y.astype(weights.dtype))


def _activate(kind, x):
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x / (1 + jnp.exp(-x))

"""GPU kernel for the product of one row x with a weight matrix, whose partial sums the next kernel adds up.

Programs (blocks of the kernel's grid) split the depth, which is the dimension that is summed over. A program starts all
its reads at once: its part of x, and [depth / splits, columns] of the weights. It writes a partial sum. The kernel that
reads the product adds up the partial sums before its own product. So half a decoder layer needs no kernel that only
adds, normalises or activates.

An RMSNorm before the product is applied in two steps. This kernel multiplies the row by the norm's scale, and writes
partial sums of the row's squares beside the partial sums of the product. The kernel that adds up the parts multiplies
by 1 / rms.

A matrix in 8 bits (`weights/interleaved.py`) is read as words of four values along the depth, which are converted in
registers. Its scales are applied to the partial sums.

Small matrices are read in the time that starting a few kernels takes, so the number of kernels matters. More rows and
larger matrices are for `_few_rows` (see docs/notes/gpu.md).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._overlap import start_next
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.weights import AnyWeight, Weight
from pallas_kernels.weights.interleaved import CHUNK, QUARTER, Interleaved, unpacked

STEP, MAX_STEP = 64, 256  # least and largest number of weight rows in one read
MAX_SHARE = 1 << 15  # largest number of weights that a program reads, since all have to fit into its registers
MAX_SIZE = 1 << 24  # exclusive upper bound of a weight matrix's number of elements; larger ones are for `_few_rows`


@dataclasses.dataclass(frozen=True)
class Parts:
    """The product of one row x with a matrix, as partial sums that are still to be added up.

    sums: f32[splits, width], partial sums of the product.
    squares: f32[splits], partial sums of x's squares, if the factor 1 / rms of a norm of x is still to be applied; else
      None.
    """

    sums: jax.Array
    squares: jax.Array | None = None


def covers(*weights: AnyWeight) -> bool:
    """Return whether the kernel supports these matrices and they are small enough for it."""
    return all(
        (not isinstance(w, Weight) or (isinstance(w, Interleaved) and w.by_output))
        and w.dtype == jnp.bfloat16
        and w.shape[0] % step_of(w) == 0
        and w.shape[1] % 64 == 0
        and w.size < MAX_SIZE
        for w in weights
    )


def step_of(weights: AnyWeight) -> int:
    """Return the least number of weight rows in one read of a matrix."""
    return CHUNK if isinstance(weights, Interleaved) else STEP


def tile(depth: int, width: int, step: int = STEP) -> tuple[int, int]:
    """Return (number of columns of a program, number of splits of the depth) for a matrix [depth, width].

    A multiprocessor gets one program, or a few for a larger matrix.

    step: divisor of the number of weight rows of a program, see `step_of`.
    """
    columns = 128 if width % 128 == 0 and width > 2048 else 64
    blocks = width // columns
    wanted = 200 if depth > 2048 or width > 4096 else 128  # least number of Triton programs for the product

    def enough(splits: int) -> bool:
        return splits * blocks >= wanted and depth // splits * columns <= MAX_SHARE

    return columns, fewest_splits(depth // step, enough)


def fewest_splits(steps: int, enough: Callable[[int], bool]) -> int:
    """Return the least divisor of `steps` for which `enough` returns True; `steps` if there is none."""
    for splits in range(1, steps):
        if steps % splits == 0 and enough(splits):
            return splits
    return steps


def split_product(
    x: Any,
    weights: AnyWeight,
    *,
    norm: jax.Array | None = None,
    parts: Parts | None = None,
    gated: tuple[Parts, str, int, int] | None = None,
    finish: tuple[jax.Array, jax.Array] | None = None,
    zeros: int = 0,
    eps: float = 0.0,
    device: Device,
) -> dict[str, Any]:
    """Return x @ weights as the entry "parts" (`Parts`) of a dict. The options add more entries.

    Args:
      x: [depth], the vector to multiply; None if `gated` is given, from which it is computed.
      weights: [depth, width], for which `covers` returns True.
      norm: f32[depth], scale of an RMSNorm of x before the product; None for no norm. The factor 1 / rms is left to the
        kernel that reads the parts.
      parts: partial sums of an earlier product, which are added to x first; or None. The sum is the entry "new_x".
      gated: (parts, activation, block, norm_width), or None. The vector to multiply is then activation(gate) * up. Gate
        and up are an earlier product, whose partial sums are the `parts` in this tuple: `block` columns of gate and
        `block` columns of up in turn. norm_width: number of elements of the vector that was normed before that product.
      finish: (residual, counts), or None. For each block of columns, the program that ends last adds up the partial
        sums and the residual. The result is the entry "out". counts: zeros, one for each block of columns, to which
        the programs that have ended are added; returned changed as the entry "counts".
      zeros: number of zeros to return as the entry "zeros", for a later kernel's `counts`.
      eps: epsilon of the norm in `gated`.
      device: the device that the program is compiled for.
    """
    depth, width = weights.shape
    columns, splits = tile(depth, width, step_of(weights))
    operands = {"x": x, "weights": weights, "norm": norm}
    of_words = None
    if isinstance(weights, Interleaved):
        of_words = weights.values.dtype
        words = lax.bitcast_convert_type(weights.values.reshape(width, depth // 4, 4), jnp.int32)
        operands |= {"weights": words, "scale": weights.of_outputs()}
    activation = block = norm_width = None
    if parts is not None:
        operands["more"] = parts.sums
    if gated is not None:
        gate, activation, block, norm_width = gated
        operands |= {"gate": gate.sums, "gate_squares": gate.squares}
    if finish is not None:
        operands["residual"], operands["old_counts"] = finish
    operands = {name: value for name, value in operands.items() if value is not None}
    shape: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
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
            _kernel, names=(*operands, *outputs), share=depth // splits, columns=columns, dtype=weights.dtype,
            of_words=of_words, eps=eps, activation=activation, block=block,
            norm_width=norm_width, device=device,
        ),
        grid=(width // columns, splits),
        out_shape=list(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret,
        name="split_product",
    )(*operands.values())  # fmt: skip
    named = dict(zip(outputs, results, strict=True))
    return {"parts": Parts(named["sums"], named.get("squares")), **named}


def _kernel(
    *refs: Ref,
    names: tuple[str, ...],
    share: int,
    columns: int,
    dtype: Any,
    of_words: Any,
    eps: float,
    activation: str | None,
    block: Any,  # an integer, or None without activation, like norm_width
    norm_width: Any,
    device: Device,
) -> None:
    """Compute `split_product`.

    share: number of weight rows that a program multiplies.
    dtype: dtype of the activations.
    of_words: dtype of 8-bit weights that are given as words; None for other weights.
    """
    ref = dict(zip(names, refs, strict=True))
    weights, sums = ref["weights"], ref["sums"]
    splits = sums.shape[0]
    # number of elements of the vector that are computed at a time, and multiplied with as many weight rows
    size = math.gcd(share, MAX_STEP, block or MAX_STEP) if of_words is None else QUARTER
    column_block, split = pl.program_id(0), start_next(pl.program_id(1), device)
    column = column_block * columns + jnp.arange(columns, dtype=jnp.int32)
    firsts = [split * share + at for at in range(0, share, size)]
    at = jnp.arange(size, dtype=jnp.int32)

    def parts(array: Ref, at: jax.Array) -> jax.Array:
        """Start reading the elements [:, at] of an array of partial sums [splits, _]. The caller adds them up."""
        part = jnp.arange(pl.next_power_of_2(array.shape[0]), dtype=jnp.int32)
        mask = jnp.broadcast_to((part < array.shape[0])[:, None], (part.shape[0], at.shape[0]))
        return plgpu.load(array.at[part[:, None], at[None, :]], mask=mask, other=0)

    def start_reading(first: jax.Array) -> list[jax.Array]:
        """Start reading the arrays from which x [first : first + size] is computed."""
        if activation is not None:  # lax.div shows the compiler that the columns stay aligned, which "//" would hide
            gate = lax.div(first, block) * (2 * block) + lax.rem(first, block)
            return [parts(ref["gate"], gate + shift + at) for shift in (0, block)]
        some = [plgpu.load(ref[name].at[first + at]) for name in ("x", "norm") if name in ref]
        return [*some, *([parts(ref["more"], first + at)] if "more" in ref else [])]

    def source(first: jax.Array, read: list[jax.Array]) -> tuple[jax.Array, Any]:
        """Return elements first to first + size of the vector to multiply, and their squares before the norm's scale.

        The squares are None without a norm.

        read: the arrays that `start_reading` returned.
        """
        if activation is not None:
            gate, up = (jnp.sum(part, axis=0) * shrink for part in read)
            return activate(activation, gate) * up, None
        h = read[0].astype(jnp.float32)
        if "more" in ref:
            x = (h + jnp.sum(read[-1], axis=0)).astype(dtype)
            plgpu.store(ref["new_x"].at[first + at], x, mask=jnp.broadcast_to(column_block == 0, x.shape))
            h = x.astype(jnp.float32)
        return (h * read[1], h * h) if "norm" in ref else (h, None)

    def read_weights() -> list[jax.Array]:
        """Start reading the weights.

        Return tiles [size, columns], or arrays of words [columns, QUARTER] from which `unpacked` makes four tiles each.
        """
        if of_words is None:
            return [plgpu.load(weights.at[(first + at)[:, None], column[None, :]]) for first in firsts]
        words = [split * (share // 4) + word for word in range(0, share // 4, QUARTER)]
        return [plgpu.load(weights.at[column[:, None], (first + at)[None, :]]) for first in words]

    def multiplied(tiles: list[jax.Array], sources: list[Any]) -> jax.Array:
        """Return the weights times the vector, added up: f32[columns]."""
        if of_words is None:
            return jnp.sum(
                added(tile.astype(jnp.float32) * h[:, None] for tile, (h, _) in zip(tiles, sources, strict=True)),
                axis=0,
            )
        quarters = [quarter for words in tiles for quarter in unpacked(words, of_words, device)]
        products = [tile.astype(jnp.float32) * h[None, :] for tile, (h, _) in zip(quarters, sources, strict=True)]
        scale = plgpu.load(ref["scale"].at[column]) * (64.0 if of_words == jnp.int8 else 1.0)  # see `unpacked`
        return jnp.sum(added(products), axis=1) * scale

    # All reads start before the first is waited for. The small reads of x start before the reads of the weights.
    if activation is not None:
        squares = [plgpu.load(ref["gate_squares"].at[jnp.int32(part)]) for part in range(ref["gate_squares"].shape[0])]
    reads = [start_reading(first) for first in firsts]
    tiles = read_weights()
    if activation is not None:
        shrink = lax.rsqrt(added(squares) / norm_width + eps)
    sources = [source(first, read) for first, read in zip(firsts, reads, strict=True)]
    plgpu.store(sums.at[split, column], multiplied(tiles, sources))
    if "norm" in ref:
        plgpu.store(ref["squares"].at[split], jnp.sum(added(square for _, square in sources)))
    if "zeros" in ref:
        at = jnp.arange(pl.next_power_of_2(ref["zeros"].shape[0]), dtype=jnp.int32)
        mask = (at < ref["zeros"].shape[0]) & (column_block + split == 0)
        plgpu.store(ref["zeros"].at[at], jnp.zeros_like(at), mask=mask)
    if "out" in ref:
        if not device.interpret:  # the barrier makes all writes of this program visible before it is counted
            plgpu.debug_barrier()
        before = plgpu.atomic_add(ref["counts"], (column_block,), jnp.int32(1))

        @pl.when(before == splits - 1)
        def _finish() -> None:
            y = plgpu.load(ref["residual"].at[column]).astype(jnp.float32) + jnp.sum(parts(sums, column), axis=0)
            plgpu.store(ref["out"].at[column], y.astype(dtype))


def added(arrays: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of the arrays.

    Python's `sum` would begin with 0. The compiler could not remove that addition, because 0 + -0 is 0 and not -0.
    """
    return functools.reduce(operator.add, arrays)


def activate(kind: str, x: jax.Array) -> jax.Array:
    """Apply an activation function to x, inside a kernel. kind: "silu" or "gelu_tanh"."""
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x / (1 + jnp.exp(-x))

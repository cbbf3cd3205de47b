"""Logits -> the distribution a request asked for: temperature, then min-p, top-k, top-p. No sort anywhere.

Thresholds are found from the bits of the values, by counting, exactly: a sort inside the decoding loop is slow on every
backend, and on GPU both it and a loop break CUDA graphs into pieces. Values tied with the threshold are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, UInt

DRAFT_BITS = 16  # of a draft's thresholds, whose law is free: half of the passes
PIECES = 256  # of all rows, where threshold has no loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SamplingRows:
    """Each row's wishes.

    temperature f32[B] (0: greedy).
    top_k i32[B] (0: off).
    top_p f32[B] (1: off).
    min_p f32[B] (0: off).
    seed uint32[B,2]: 64 bits; within a launch what `rng.of_seed` makes of them.
    rule i32[B]: the number of the acceptance rule.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    rule: jax.Array

    @property
    def greedy(self) -> jax.Array:
        return self.temperature == 0.0


def process(
    logits: Float[Array, "B T V"], rows: SamplingRows, *, filters: bool, bits: int = 32
) -> Float[Array, "B T V"]:
    """Logits -> scaled and filtered logits, -inf where forbidden; softmax of it is the row's distribution.

    filters=False leaves min-p, top-k and top-p out (no row asks for them). Greedy rows keep their logits. The largest
    logit is always kept, whatever float32 makes of the wishes. bits: as many of a threshold are found, and what is as
    large in these is kept.
    """
    at = lambda x: x[:, None, None]
    temperature = jnp.where(rows.greedy, 1.0, rows.temperature)
    z = logits / at(temperature)
    if not filters:
        return z
    largest = jnp.max(z, axis=-1, keepdims=True)
    floor = largest + jnp.log(at(rows.min_p))  # log(0) = -inf: off
    z = jnp.where(z >= floor, z, -jnp.inf)
    top_k = jnp.where(rows.top_k > 0, rows.top_k, z.shape[-1]).astype(jnp.float32)
    z = jnp.where(ordered(z) >= threshold(ordered(z), jnp.ones_like(z), at(top_k), bits), z, -jnp.inf)
    p = jax.nn.softmax(z, axis=-1)
    keep = ordered(p) >= threshold(ordered(p), p, at(rows.top_p), bits)
    return jnp.where(keep | (at(rows.top_p) >= 1.0) | (z >= largest), z, -jnp.inf)


def ordered(x: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """float32 -> uint32 that compares alike, the two zeros equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def threshold(
    values: UInt[Array, "*rows V"], weights: Float[Array, "*rows V"], need: Float[Array, "*#rows 1"], bits: int = 32
) -> UInt[Array, "*rows 1"]:
    """The largest t for which the weights of {values >= t} sum to at least need, over the last axis (kept as 1). bits:
    of t, its highest; the others are 0.

    On GPU a loop inside the decoding loop costs more than what it counts (see docs/notes/thresholds.md); on CPU
    comparing is what costs.
    """
    by_bits, by_fours = functools.partial(bits_at_a_time, 1, bits), functools.partial(without_loops, bits=bits)
    return lax.platform_dependent(values, weights, need, cuda=by_fours, rocm=by_fours, default=by_bits)


def without_loops(values: jax.Array, weights: jax.Array, need: jax.Array, *, bits: int = 32) -> jax.Array:
    """`threshold` as GPUs find it."""
    return bits_at_a_time(4, bits, in_pieces(values), in_pieces(weights), need)


def in_pieces(x: jax.Array) -> jax.Array:
    """[*rows, V] -> [*rows, pieces, V / pieces], zeros at the end. The compiler gives a piece to one multiprocessor, so
    there are enough of them for all."""
    pieces = max(1, PIECES // math.prod(x.shape[:-1]))
    width = -(-x.shape[-1] // pieces)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, pieces * width - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], pieces, width)


def bits_at_a_time(bits: int, of: int, values: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """`threshold` in of / bits passes, a loop where it is one bit at a time.

    A pass is one reduction to 2**bits - 1 sums, one a candidate, and reads each value once. Rows may be in pieces.
    """
    refine = lambda i, t: refined(bits, values, weights, need, t, jnp.asarray(32 - bits * (i + 1), jnp.uint32))
    t = jnp.zeros((*values.shape[: need.ndim - 1], 1), jnp.uint32)
    return lax.fori_loop(0, of // bits, refine, t, unroll=bits > 1)


@functools.partial(jax.jit, static_argnums=0)  # lowered once in a program, for all passes
def refined(
    bits: int, values: jax.Array, weights: jax.Array, need: jax.Array, t: jax.Array, shift: jax.Array
) -> jax.Array:
    """The threshold t with its next bits, which stand at `shift`."""
    rows = need.ndim - 1
    zeros = [jnp.float32(0)] * ((1 << bits) - 1)
    each_with_each = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
    candidates = [t | jnp.uint32(digit) << shift for digit in range(1, 1 << bits)]
    wide = [c.reshape(c.shape[:-1] + (1,) * (values.ndim - rows)) for c in candidates]
    sums = [jnp.where(values >= candidate, weights, 0.0) for candidate in wide]
    for axis in reversed(range(rows, values.ndim)):
        sums = lax.reduce(sums, zeros, each_with_each, (axis,))
    digit = sum((s[..., None] >= need).astype(jnp.uint32) for s in sums)
    return t | digit << shift

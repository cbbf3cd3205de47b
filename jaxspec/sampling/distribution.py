"""The distribution that a request asks for: logits scaled by temperature, then filtered by min-p, top-k and top-p.

The thresholds of top-k and top-p are computed without sorting, one or four bits at a time. For each candidate of a
threshold, the values at or above it are counted (top-k), or their probabilities are summed (top-p). A sort in the
decoding loop is slow on every backend, and on GPU both a sort and an inner loop break the CUDA graph into pieces.
Values that are equal to a threshold are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Shaped, UInt

# Number of leading bits, of 32, that are computed of a threshold for a draft's distribution q. Using only these bits
# halves the work, and is allowed because q may be any distribution.
DRAFT_BITS = 16
PIECES = 256  # number of pieces, of all rows together, into which logits are split for a threshold on GPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SamplingRows:
    """The sampling parameters of each row of a batch.

    temperature f32[B]: 0 is greedy.
    top_k i32[B]: 0 is off.
    top_p f32[B]: 1 is off.
    min_p f32[B]: 0 is off.
    seed uint32[B,2]: high and low word of the seed. Inside a launch (one run of the decoding program) this is the
      result of `rng.of_seed`.
    rule i32[B]: number of the acceptance rule (`verify.rules.number`).
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    rule: jax.Array

    @property
    def greedy(self) -> jax.Array:
        """Return whether each row is greedy, bool[B]."""
        return self.temperature == 0.0


def process(
    logits: Float[Array, "B T V"], rows: SamplingRows, *, filters: bool, bits: int = 32
) -> Float[Array, "B T V"]:
    """Return scaled and filtered logits, with -inf for removed ids. Their softmax is each row's distribution.

    The logits of greedy rows are not scaled. The largest logit is always kept, even if rounding in float32 would remove
    it.

    filters: False skips min-p, top-k and top-p, for batches in which no row uses them.
    bits: number of leading bits that are computed of the thresholds of top-k and top-p; the other bits are 0. So values
      that share these bits with a threshold are kept.
    """
    temperature = jnp.where(rows.greedy, 1.0, rows.temperature)
    z = logits / per_row(temperature)
    if not filters:
        return z
    largest = jnp.max(z, axis=-1, keepdims=True)
    floor = largest + jnp.log(per_row(rows.min_p))  # for min_p = 0 the floor is log(0) = -inf, which removes nothing
    z = jnp.where(z >= floor, z, -jnp.inf)
    top_k = jnp.where(rows.top_k > 0, rows.top_k, z.shape[-1]).astype(jnp.float32)
    z = jnp.where(ordered(z) >= threshold(ordered(z), jnp.ones_like(z), per_row(top_k), bits), z, -jnp.inf)
    p = jax.nn.softmax(z, axis=-1)
    keep = ordered(p) >= threshold(ordered(p), p, per_row(rows.top_p), bits)
    return jnp.where(keep | (per_row(rows.top_p) >= 1.0) | (z >= largest), z, -jnp.inf)


def per_row(x: Shaped[Array, " B"]) -> Shaped[Array, "B 1 1"]:
    """Return one value per row with two more axes, to broadcast against logits [B, T, V]."""
    return x[:, None, None]


def ordered(x: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Map float32 numbers to uint32 numbers that have the same order. 0.0 and -0.0 give the same number."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def threshold(
    values: UInt[Array, "*rows V"], weights: Float[Array, "*rows V"], need: Float[Array, "*#rows 1"], bits: int = 32
) -> UInt[Array, "*rows 1"]:
    """Return the largest t for which the weights of all values >= t sum to at least `need`, over the last axis.

    GPUs have an implementation of their own, without a loop. On GPU, a loop inside the decoding loop costs more than
    the sums themselves (see docs/notes/thresholds.md). On CPU, comparisons cost most, and one bit at a time needs the
    fewest.

    bits: number of leading bits of t that are computed; the other bits are 0.
    """
    by_bits = functools.partial(bits_at_a_time, 1, bits)
    by_fours = functools.partial(without_loops, bits=bits)
    result: UInt[Array, "*rows 1"] = lax.platform_dependent(
        values, weights, need, cuda=by_fours, rocm=by_fours, default=by_bits
    )
    return result


def without_loops(values: jax.Array, weights: jax.Array, need: jax.Array, *, bits: int = 32) -> jax.Array:
    """Compute `threshold` in a way that is fast on GPUs: four bits at a time, unrolled, with rows split into pieces."""
    return bits_at_a_time(4, bits, in_pieces(values), in_pieces(weights), need)


def in_pieces(x: jax.Array) -> jax.Array:
    """Split the last axis of [*rows, V]: return [*rows, pieces, V / pieces], padded with zeros.

    The compiler assigns each piece to one multiprocessor of a GPU. PIECES is large enough to occupy all
    multiprocessors.
    """
    pieces = max(1, PIECES // math.prod(x.shape[:-1]))
    width = -(-x.shape[-1] // pieces)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, pieces * width - x.shape[-1])]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], pieces, width)


def bits_at_a_time(bits: int, of: int, values: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Compute the `of` leading bits of `threshold` in of / bits steps: a loop if bits is 1, else unrolled.

    A step is one reduction to 2**bits - 1 sums, one for each candidate of the threshold. It reads each value once.

    values, weights: arrays [*rows, V], or [*rows, pieces, V / pieces] as `in_pieces` returns them.
    need: required sum of weights for each row, [*rows, 1].
    """

    def refine(i: Any, t: jax.Array) -> jax.Array:
        shift = jnp.asarray(32 - bits * (i + 1), jnp.uint32)
        more: jax.Array = refined(bits, values, weights, need, t, shift)
        return more

    t = jnp.zeros((*values.shape[: need.ndim - 1], 1), jnp.uint32)
    result: jax.Array = lax.fori_loop(0, of // bits, refine, t, unroll=bits > 1)
    return result


@functools.partial(jax.jit, static_argnums=0)  # jit makes JAX lower this function once per program, for all steps
def refined(
    bits: int, values: jax.Array, weights: jax.Array, need: jax.Array, t: jax.Array, shift: jax.Array
) -> jax.Array:
    """Return the threshold t with its next `bits` bits computed. shift: position of the lowest of these bits."""
    rows = need.ndim - 1
    zeros = [jnp.float32(0)] * ((1 << bits) - 1)
    candidates = [t | jnp.uint32(digit) << shift for digit in range(1, 1 << bits)]
    wide = [c.reshape(c.shape[:-1] + (1,) * (values.ndim - rows)) for c in candidates]
    sums = [jnp.where(values >= candidate, weights, 0.0) for candidate in wide]
    for axis in reversed(range(rows, values.ndim)):
        sums = lax.reduce(sums, zeros, added, (axis,))
    digit = sum((s[..., None] >= need).astype(jnp.uint32) for s in sums)
    return t | digit << shift


def added(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the elementwise sums of two lists of arrays."""
    return [x + y for x, y in zip(a, b, strict=True)]

"""Weight matrices of few bits: integers with a scale, and perhaps a zero point or an offset, for each group of inputs.

The integers lie in planes of 1, 2, 4 or 8 bits. Memory holds CHUNK inputs of an output together: byte j of the chunk in
a plane of b bits has the inputs j, j + 4b, j + 8b and so on, from its lowest bits to its highest. So a plane of 4 bits
has inputs j and j + 16 in a byte, as GGUF has in Q4_0. All inputs that a shift of the bytes yields are neighbours, and
no product has to interleave them. A device whose kernel needs another order can have a form of its own, as
`interleaved.py` is for 8 bits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain
from pallas_kernels.weights import Weight

CHUNK = 32  # number of inputs that share the bytes of a plane
FEW_ROWS = 96  # largest number of rows of x for which a TPU sums over groups; for more it dequantises the matrix
LANES = 128  # bytes of a row that a TPU reads together
UNROLL = 2  # steps of that loop that are unrolled
MOST = 15  # largest integer of 4 bits
# Divisors of a group's range to try as its scale. Those above the first clip the largest weights, others err less.
SYMMETRIC, ASYMMETRIC = (7, 7.5, 8, 8.5, 9, 9.75, 10.5), (15, 16, 17, 18.5, 20)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The way in which a matrix of few bits is stored.

    bits: number of bits of each plane. The first plane has the lowest bits of the integers.
    zero: integer that stands for a weight of 0, for all groups alike.
    scale: dtype and number of inputs of a group (0 for all inputs) of each factor of the scale.
    offset: the same of each factor of the offset; empty if there is no offset.
    has_zeros: whether each group of the first scale has its own integer for 0.
    """

    bits: tuple[int, ...]
    zero: int
    scale: tuple[tuple[str, int], ...]
    offset: tuple[tuple[str, int], ...] = ()
    has_zeros: bool = False


HALF, BYTE = "float16", "uint8"
# GGUF's blocks (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h), by their names there.
BLOCKS: Mapping[str, Layout] = {
    "q8_0": Layout((8,), 128, ((HALF, 32),)),
    "q4_0": Layout((4,), 8, ((HALF, 32),)),
    "q4_1": Layout((4,), 0, ((HALF, 32),), ((HALF, 32),)),
    "q4_k": Layout((4,), 0, ((HALF, 256), (BYTE, 32)), ((HALF, 256), (BYTE, 32))),
    "q5_k": Layout((4, 1), 0, ((HALF, 256), (BYTE, 32)), ((HALF, 256), (BYTE, 32))),
    "q6_k": Layout((4, 2), 32, ((HALF, 256), ("int8", 16))),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped(Weight):
    """A matrix of weights (integer - zero) * scale + offset, in the integers' groups.

    values: a plane u8[O, I * bits / 8] for each number of bits of the layout.
    scale: the scale's factors, [O, I / inputs] of each.
    offset: the offset's factors, likewise.
    zeros: i8[O, I / inputs], for the groups of the first scale; None if all groups have the layout's zero.
    order: i32[I], the input of x for each input of the matrix; None for the inputs' own order.
    computes_in: dtype of the activations, and of the dequantised matrix.
    """

    form: ClassVar[str] = "grouped"
    values: tuple[jax.Array, ...]
    scale: tuple[jax.Array, ...]
    offset: tuple[jax.Array, ...]
    zeros: jax.Array | None
    order: jax.Array | None
    layout: Layout = dataclasses.field(metadata={"static": True})
    computes_in: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, size = self.values[0].shape
        return size * 8 // self.layout.bits[0], outputs

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.computes_in)

    @property
    def size_of_groups(self) -> int:
        """The number of inputs that share all factors of the scale."""
        return int(self.shape[0]) // max(factor.shape[1] for factor in self.scale)

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if self.order is not None:
            return dataclasses.replace(self, order=None).matmul(x[..., self.order], dtype)

        def dequantised(x: jax.Array, weight: Grouped) -> jax.Array:
            return dequantised_product(x, weight, dtype)

        def summed(x: jax.Array, weight: Grouped) -> jax.Array:
            return sum_of_groups(x, weight).astype(dtype)

        if x.size // x.shape[-1] > FEW_ROWS or self.size_of_groups % CHUNK:
            return dequantised(x, self)
        product: jax.Array = lax.platform_dependent(x, self, tpu=summed, default=dequantised)
        return product

    def rows(self) -> jax.Array:
        """Return the dequantised matrix, output-first [O, I], rounded to the dtype of the activations."""
        groups = int(self.shape[0]) // self.size_of_groups
        zeros = None if self.zeros is None else finest((self.zeros,), groups)
        offset = finest(self.offset, groups) if self.offset else None
        x = self.dequantised(finest(self.scale, groups), zeros, offset)
        return x if self.order is None else x[:, jnp.argsort(self.order)]

    def integers(self) -> jax.Array:
        """Return the integers i32[O, I], in the matrix's order of the inputs."""
        planes = zip(self.values, self.layout.bits, shifts(self.layout.bits), strict=True)
        whole: Any = sum(unpacked(plane, bits).astype(jnp.int32) << shift for plane, bits, shift in planes)
        return jnp.asarray(whole)

    def dequantised(self, scale: jax.Array, zeros: jax.Array | None, offset: jax.Array | None) -> jax.Array:
        """Return (integer - zero) * scale + offset, [O, I] in the dtype of the activations.

        scale, offset: f32[O, groups].
        zeros: [O, groups]; None for the layout's zero.
        """
        integers = self.integers()
        zero: Any = self.layout.zero if zeros is None else zeros[:, :, None].astype(jnp.int32)
        x = (integers.reshape(*scale.shape, -1) - zero).astype(jnp.float32) * scale[:, :, None]
        x = x if offset is None else x + offset[:, :, None]
        found: jax.Array = x.reshape(integers.shape).astype(self.dtype)
        return found

    def natural(self) -> "Grouped":
        """Return the weight in the form in which it was loaded, which is this one."""
        return self

    def dense(self) -> jax.Array:
        return self.rows().T

    def specs(self, spec: Any) -> Any:
        of_outputs, of_inputs = reversed((*spec, None, None)[:2])

        def place(x: Any) -> Any:
            # A dimension with a single group is replicated, not sharded.
            return P(of_outputs, of_inputs if x.shape[1] > 1 else None)

        placed = jax.tree.map(place, dataclasses.replace(self, order=None))
        return placed if self.order is None else dataclasses.replace(placed, order=P(None))


def shifts(bits: tuple[int, ...]) -> tuple[int, ...]:
    """Return the place of each plane's lowest bit in the integers."""
    return tuple(sum(bits[:i]) for i in range(len(bits)))


def finest(factors: tuple[jax.Array, ...], groups: int) -> jax.Array:
    """Return the product of factors [O, N], repeated for `groups` groups: f32[O, groups]."""
    first, *rest = (jnp.repeat(x.astype(jnp.float32), groups // x.shape[1], axis=1) for x in factors)
    for factor in rest:
        first = first * factor
    return first


def packed(values: Any, bits: tuple[int, ...]) -> tuple[Any, ...]:
    """Pack integers u8[O, I] into planes u8[O, I * bits / 8], of numpy or jax as the integers are."""
    planes = []
    for b, shift in zip(bits, shifts(bits), strict=True):
        parts = ((values >> shift) & ((1 << b) - 1)).reshape(values.shape[0], -1, 8 // b, CHUNK * b // 8)
        plane = parts[:, :, 0]
        for part in range(1, 8 // b):
            plane = plane | parts[:, :, part] << (b * part)
        planes.append(plane.reshape(values.shape[0], -1))
    return tuple(planes)


def parts_of(plane: Any, bits: int) -> list[Any]:
    """Return the integers u8[...] of each part of a plane's bytes u8[...], from the lowest bits to the highest."""
    if bits == 8:
        return [plane]
    return [(plane >> np.uint8(bits * part)) & np.uint8((1 << bits) - 1) for part in range(8 // bits)]


def unpacked(plane: Any, bits: int) -> Any:
    """Return the integers u8[O, I] of a plane u8[O, I * bits / 8], in the order of the inputs."""
    pieces = plane.reshape(plane.shape[0], -1, CHUNK * bits // 8)
    array = np if isinstance(plane, np.ndarray) else jnp
    return array.stack(parts_of(pieces, bits), axis=2).reshape(plane.shape[0], -1)


def dequantised_product(x: jax.Array, weight: Grouped, dtype: Any) -> jax.Array:
    """Multiply x [..., I] with the dequantised matrix. Return [..., O] in `dtype`."""
    # With the barrier the matrix is dequantised only when x is there. Otherwise XLA on a GPU dequantises the matrices
    # of many layers in advance, and all of them are in memory at the same time.
    x, weight = lax.optimization_barrier((x, weight))
    return plain.dot(x, weight.rows(), 1, dtype)


def sum_of_groups(x: jax.Array, weight: Grouped) -> jax.Array:
    """Multiply x [..., I] with a few groups of inputs at a time, and scale each group's product. Return f32[..., O].

    XLA on TPU converts the integers within each product. It would write a dequantised matrix to memory for all of them,
    and copy a plane of which a step reads less than whole rows of LANES bytes (docs/notes/quantization.md).
    Only for groups of whole chunks.
    """
    inputs, outputs = weight.shape
    size, bits = weight.size_of_groups, weight.layout.bits
    step = math.gcd(inputs, math.lcm(size, LANES * 8 // max(bits)))
    count = step // size  # groups of a step
    scale, offset = (finest(f, inputs // size).T if f else None for f in (weight.scale, weight.offset))
    zeros = None if weight.zeros is None else finest((weight.zeros,), inputs // size).T
    assert scale is not None
    rows = x.reshape(-1, inputs)
    # masked[g]: x with 0 at all inputs but those of quantisation group g of each step of the loop. One product of all
    # copies then gives a sum for each group, which is multiplied by that group's scale.
    own = jnp.arange(inputs) // size % count == jnp.arange(count)[:, None]
    masked = jnp.where(own[:, None], rows, 0)

    def of_step(factor: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(factor, i * count, count)[:, None]

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        product = jnp.zeros((count, *total.shape), jnp.float32)
        for plane, b, shift in zip(weight.values, bits, shifts(bits), strict=True):
            width = step * b // 8
            each = parts_of(lax.dynamic_slice_in_dim(plane, i * width, width, 1), b)
            of_x = masked.reshape(count, len(rows), -1, 8 // b, CHUNK * b // 8)
            for part, values in enumerate(each):
                shifted = (values.astype(jnp.int32) << shift).astype(x.dtype)
                if shift == 0:  # the first plane carries the zero
                    shifted = shifted - jnp.asarray(weight.layout.zero, x.dtype)
                pick = of_x[..., part, :].reshape(count, len(rows), -1)
                pick = lax.dynamic_slice_in_dim(pick, i * width, width, 2)
                product = product + plain.dot(pick, shifted, 1, jnp.float32)
        product = product * of_step(scale, i)
        if offset is not None or zeros is not None:
            sums = lax.dynamic_slice_in_dim(masked, i * step, step, 2).astype(jnp.float32).sum(-1, keepdims=True)
        if zeros is not None:
            product = product + sums * ((weight.layout.zero - of_step(zeros, i)) * of_step(scale, i))
        if offset is not None:
            product = product + sums * of_step(offset, i)
        return total + product.sum(0)

    start = jnp.zeros((len(rows), outputs), jnp.float32)
    total: jax.Array = lax.fori_loop(0, inputs // step, add, start, unroll=UNROLL)
    return total.reshape(*x.shape[:-1], outputs)


def in_four_bits(group: int, scales: str = "bfloat16", *, zeros: bool = False) -> Layout:
    """Return the layout of integers of 4 bits. group: number of inputs that share a scale; 0 for all."""
    return Layout((4,), 8, ((scales, group),), has_zeros=zeros)


def quantise(x: jax.Array, layout: Layout) -> Grouped:
    """Quantise a matrix [I, O] to 4 bits. Each group gets whichever candidate scale has the least squared error.

    layout: result of `in_four_bits`. If it has no zero points, quantised values are symmetric around 0.
    """
    inputs, outputs = x.shape
    dtype, size = layout.scale[0]
    groups = x.T.astype(jnp.float32).reshape(outputs, -1, size or inputs)
    low, high = jnp.minimum(groups.min(-1), 0), jnp.maximum(groups.max(-1), 0)
    reach = high - low if layout.has_zeros else jnp.maximum(high, -low)
    best: tuple[jax.Array, ...] | None = None
    for divisor in ASYMMETRIC if layout.has_zeros else SYMMETRIC:
        scale = (reach / divisor).astype(dtype)
        scale = jnp.where(scale == 0, 1, scale).astype(dtype)  # no reader accepts a scale of 0
        wide = scale.astype(jnp.float32)
        # Clipping takes from both ends of a group alike.
        middle = (low + high) / 2 / wide
        zero = jnp.clip(jnp.rint(MOST / 2 - middle), 0, MOST) if layout.has_zeros else jnp.full_like(wide, layout.zero)
        values = jnp.clip(jnp.rint(groups / wide[..., None]) + zero[..., None], 0, MOST)
        error = jnp.square((values - zero[..., None]) * wide[..., None] - groups).sum(-1)
        found = error, scale, zero, values
        if best is None:
            best = found
            continue
        better = error < best[0]
        best = tuple(
            jnp.where(better[..., None] if new.ndim == 3 else better, new, old)
            for new, old in zip(found, best, strict=True)
        )
    assert best is not None
    _, scale, zero, values = best
    planes = packed(values.astype(jnp.uint8).reshape(outputs, inputs), layout.bits)
    zeros = zero.astype(jnp.int8) if layout.has_zeros else None
    return Grouped(planes, (scale,), (), zeros, None, layout, x.dtype.name)


def arrays(
    layout: Layout, shape: tuple[int, int], make: Callable[[str, int, tuple[int, int], str], Any], computes_in: str
) -> Grouped:
    """Return a matrix of this layout from its arrays.

    shape: shape [I, O] of the matrix.
    make: function of an array's field, place in the field, shape and dtype that returns the array.
    computes_in: dtype of the activations.
    """
    inputs, outputs = shape

    def of_groups(field: str, sizes: tuple[tuple[str, int], ...]) -> tuple[Any, ...]:
        return tuple(
            make(field, i, (outputs, inputs // (size or inputs)), dtype) for i, (dtype, size) in enumerate(sizes)
        )

    values = tuple(make("values", i, (outputs, inputs * b // 8), BYTE) for i, b in enumerate(layout.bits))
    zeros = of_groups("zeros", (("int8", layout.scale[0][1]),)) if layout.has_zeros else (None,)
    scale, offset = of_groups("scale", layout.scale), of_groups("offset", layout.offset)
    return Grouped(values, scale, offset, zeros[0], None, layout, computes_in)


def abstract(layout: Layout, shape: tuple[int, int], computes_in: str) -> Grouped:
    """Return a matrix whose arrays are abstract, with shapes and dtypes but without values, as `arrays` does."""
    return arrays(layout, shape, lambda field, i, of_array, dtype: jax.ShapeDtypeStruct(of_array, dtype), computes_in)

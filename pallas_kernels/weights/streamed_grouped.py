"""Weight matrices of few bits in groups that a CPU reads row by row for float32 products, as `streamed.py` does."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels import plain, streamed
from pallas_kernels.weights.grouped import CHUNK, Grouped, finest, packed, parts_of, shifts, unpacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedGrouped(Grouped):
    """A matrix of one plane of 4 or 8 bits, which a CPU reads row by row. Every property is that of `Grouped`."""

    form: ClassVar[str] = "streamed_grouped"

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if self.order is not None:
            return dataclasses.replace(self, order=None).matmul(x[..., self.order], dtype)
        if x.dtype != jnp.float32:
            return super().matmul(x, dtype)
        rows = x.size // x.shape[-1]
        streams = streamed.num_streams(rows, *self.shape)
        # A reduction of a single array would compile to another loop, which waits for each addition.
        if rows > streamed.MAX_ROWS or streams * rows == 1:
            return streamed.once(by_library, x, self).astype(dtype)
        return streamed.once(by_streams, x, self, streams).astype(dtype)

    def natural(self) -> Grouped:
        return self.in_form(Grouped)


@jax.jit
def streamed_form(weight: Grouped) -> StreamedGrouped:
    """Return a weight in the form that a CPU reads. Integers in several planes get a single plane of 8 bits."""
    bits = weight.layout.bits
    if len(bits) == 1:
        return weight.in_form(StreamedGrouped)
    planes = zip(weight.values, bits, shifts(bits), strict=True)
    whole: Any = sum(unpacked(plane, b) << shift for plane, b, shift in planes)
    layout = dataclasses.replace(weight.layout, bits=(8,))
    return weight.in_form(StreamedGrouped, values=packed(whole, (8,)), layout=layout)


def by_library(x: jax.Array, weight: Grouped) -> jax.Array:
    """Multiply x with the dequantised matrix by the library that XLA calls."""
    return plain.dot(x, weight.rows(), 1, x.dtype)


def by_streams(x: jax.Array, weight: Grouped, streams: int) -> jax.Array:
    """Multiply x f32[..., I] with a matrix in one loop over its bytes, `streams` rows of the matrix at a time."""
    inputs, outputs = weight.shape
    (plane,), (bits,) = weight.values, weight.layout.bits
    groups = inputs // weight.size_of_groups
    rows = x.reshape(-1, inputs)
    # The parts of x lie as the bytes do: what a shift of a byte yields belongs to the same place of a part.
    pieces = rows.reshape(len(rows), -1, 8 // bits, CHUNK * bits // 8)
    parts = [pieces[:, :, i].reshape(len(rows), groups, -1) for i in range(8 // bits)]
    zeros = jnp.full((outputs, 1), weight.layout.zero) if weight.zeros is None else weight.zeros
    arrays = plane.reshape(outputs, groups, -1), finest(weight.scale, groups), zeros.astype(jnp.float32)
    shares = list(zip(*(jnp.split(array, streams) for array in arrays), strict=True))

    def product(row: int, share: tuple[jax.Array, ...]) -> jax.Array:
        values, scale, zero = share
        each = zip(parts, parts_of(values, bits), strict=True)
        total: Any = sum(part[row] * (value.astype(jnp.float32) - zero[:, :, None]) for part, value in each)
        found: jax.Array = total * scale[:, :, None]
        return found

    found = streamed.sums([product(row, share) for row in range(len(rows)) for share in shares], axes=2)
    result = jnp.concatenate(found).reshape(len(rows), outputs)
    if weight.offset:
        result = result + plain.dot(
            rows.reshape(len(rows), groups, -1).sum(-1), finest(weight.offset, groups), 1, x.dtype
        )
    return result.reshape(*x.shape[:-1], outputs)

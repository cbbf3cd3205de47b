"""Matrices in 8 bits: integers or e4m3 floats, with a scale for each block."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain, streamed
from pallas_kernels.weights import Weight

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # absolute value that each dtype represents


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(Weight):
    """A matrix of values times scales, one scale for each block of BI inputs and BO outputs.

    values: [I, O], int8 or float8_e4m3fn.
    scale: [I / BI, O / BO]. BI = I is a scale for each output; with BO = O too, for the whole matrix.
    computes_in: dtype of the activations, to which values * scale are rounded.
    """

    form: ClassVar[str] = "scaled"
    values: jax.Array
    scale: jax.Array
    computes_in: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.computes_in)

    @property
    def by_output(self) -> bool:
        """Whether all inputs of an output have one scale, so that it can be applied to the product."""
        return self.scale.shape[0] == 1

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if self.by_output:  # 8-bit values are exact in bfloat16, and the compiler converts them within the product
            product = plain.dot(x, self.values.astype(x.dtype), 0, jnp.float32)
            return (product * self.of_outputs()).astype(dtype)
        return plain.dot(x, self.dense(), 0, dtype)

    def of_outputs(self) -> jax.Array:
        """Return the scale of each output, f32[O], of a matrix with `by_output`."""
        return jnp.repeat(self.scale[0].astype(jnp.float32), self.shape[1] // self.scale.shape[1])

    def dense(self) -> jax.Array:
        inputs, outputs = self.shape
        blocks = self.scale.shape
        split = inputs // blocks[0], outputs // blocks[1]
        values = self.values.astype(jnp.float32).reshape(blocks[0], split[0], blocks[1], split[1])
        dense = values * self.scale.astype(jnp.float32)[:, None, :, None]
        return dense.reshape(inputs, outputs).astype(self.dtype)

    def specs(self, spec: Any) -> Any:
        # A dimension of a single block is replicated.
        of_scale: Any = P(*(axis if size > 1 else None for size, axis in zip(self.scale.shape, spec, strict=False)))
        return dataclasses.replace(self, values=spec, scale=of_scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedScaled(Weight):
    """A matrix in 8 bits, with a scale for each output, that a CPU reads row by row (`pallas_kernels/streamed.py`).

    values: [O, I], int8 or float8_e4m3fn.
    scale: f32[O].
    """

    form: ClassVar[str] = "streamed_scaled"
    dtype: ClassVar[Any] = jnp.dtype(jnp.float32)
    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[::-1]

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        return (streamed.product(x.astype(self.dtype), self.values) * self.scale).astype(dtype)

    def dense(self) -> jax.Array:
        return self.values.T.astype(self.dtype) * self.scale

    def specs(self, spec: Any) -> Any:
        inputs, outputs = (*spec, None, None)[:2]
        of_values: Any = P(outputs, inputs)
        of_scale: Any = P(outputs)
        return dataclasses.replace(self, values=of_values, scale=of_scale)


def quantise(x: jax.Array, *, dtype: str, block: tuple[int, int]) -> Scaled:
    """Round a matrix [I, O] to 8 bits, symmetric around 0, with the largest value of each block as its range.

    dtype: "int8" or "float8_e4m3fn".
    block: numbers of inputs and outputs that share a scale, divisors of I and O.
    """
    inputs, outputs = x.shape
    blocks = x.astype(jnp.float32).reshape(inputs // block[0], block[0], outputs // block[1], block[1])
    scale = jnp.abs(blocks).max(axis=(1, 3)) / LARGEST[dtype]
    values = blocks / jnp.where(scale == 0, 1.0, scale)[:, None, :, None]
    values = (jnp.rint(values) if dtype == "int8" else values).reshape(x.shape).astype(dtype)
    return Scaled(values, scale, x.dtype.name)


def abstract(shape: tuple[int, int], dtype: str, block: tuple[int, int], computes_in: str) -> Scaled:
    """Return the shapes of a quantised matrix, without values."""
    scale = shape[0] // block[0], shape[1] // block[1]
    values: Any = jax.ShapeDtypeStruct(shape, dtype)
    of_scale: Any = jax.ShapeDtypeStruct(scale, jnp.float32)
    return Scaled(values, of_scale, computes_in)

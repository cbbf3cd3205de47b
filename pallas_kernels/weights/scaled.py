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
    """A matrix of values times scales, one scale for each block of BO outputs and BI inputs.

    Values lie output-first, as in checkpoints. A GPU's matrix units take converted values from registers only if they
    are contiguous along the inputs.

    values: [O, I], int8 or float8_e4m3fn.
    scale: f32[O / BO, I / BI]. BI = I is a scale for each output; with BO = O too, for the whole matrix.
    computes_in: dtype of the activations, to which values * scale are rounded.
    """

    form: ClassVar[str] = "scaled"
    values: jax.Array
    scale: jax.Array
    computes_in: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[::-1]

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.computes_in)

    @property
    def by_output(self) -> bool:
        """Return whether all inputs of an output have one scale, so that it can be applied to the product."""
        return self.scale.shape[1] == 1

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if not self.by_output:
            return plain.dot(x, self.rows(), 1, dtype)
        # 8-bit values are exact in every dtype of activations. The compiler converts them within the product.
        return (plain.dot(x, self.values.astype(x.dtype), 1, jnp.float32) * self.of_outputs()).astype(dtype)

    def of_outputs(self) -> jax.Array:
        """Return the scale of each output, f32[O], of a matrix with `by_output`."""
        return jnp.repeat(self.scale[:, 0], self.values.shape[0] // self.scale.shape[0])

    def rows(self) -> jax.Array:
        """Return the matrix [O, I] in the dtype of the activations."""
        outputs, inputs = self.values.shape
        blocks = self.scale.shape
        values = self.values.astype(jnp.float32).reshape(blocks[0], outputs // blocks[0], blocks[1], -1)
        return (values * self.scale[:, None, :, None]).reshape(outputs, inputs).astype(self.dtype)

    def dense(self) -> jax.Array:
        return self.rows().T

    def specs(self, spec: Any) -> Any:
        of_values = tuple(reversed((*spec, None, None)[:2]))
        # A dimension of a single block is replicated.
        of_scale: Any = P(*(axis if size > 1 else None for size, axis in zip(self.scale.shape, of_values, strict=True)))
        return dataclasses.replace(self, values=P(*of_values), scale=of_scale)  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedScaled(Scaled):
    """A matrix with a scale for each output that a CPU reads row by row (`pallas_kernels/streamed.py`)."""

    form: ClassVar[str] = "streamed_scaled"

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if x.dtype != jnp.float32:
            return super().matmul(x, dtype)
        return (streamed.product(x, self.values) * self.of_outputs()).astype(dtype)


def quantise(x: jax.Array, *, dtype: str, block: tuple[int, int]) -> Scaled:
    """Round a matrix [I, O] to 8 bits, symmetric around 0, with the largest value of each block as its range.

    dtype: "int8" or "float8_e4m3fn".
    block: numbers of inputs and outputs that share a scale, divisors of I and O.
    """
    inputs, outputs = x.shape
    blocks = x.T.astype(jnp.float32).reshape(outputs // block[1], block[1], inputs // block[0], block[0])
    scale = jnp.abs(blocks).max(axis=(1, 3)) / LARGEST[dtype]
    values = blocks / jnp.where(scale == 0, 1.0, scale)[:, None, :, None]
    values = (jnp.rint(values) if dtype == "int8" else values).reshape(outputs, inputs).astype(dtype)
    return Scaled(values, scale, x.dtype.name)


def abstract(shape: tuple[int, int], dtype: str, block: tuple[int, int], computes_in: str) -> Scaled:
    """Return the shapes of a quantised matrix [I, O], without values. The arguments are those of `quantise`."""
    scale = shape[1] // block[1], shape[0] // block[0]
    values: Any = jax.ShapeDtypeStruct(shape[::-1], dtype)
    of_scale: Any = jax.ShapeDtypeStruct(scale, jnp.float32)
    return Scaled(values, of_scale, computes_in)

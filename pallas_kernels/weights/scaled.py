"""Matrices in 8 bits: integers or e4m3 floats, with a scale for each block."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain
from pallas_kernels.weights import Weight


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

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        return plain.dot(x, self.dense(), 0, dtype)

    def dense(self) -> jax.Array:
        inputs, outputs = self.values.shape
        blocks = self.scale.shape
        split = inputs // blocks[0], outputs // blocks[1]
        values = self.values.astype(jnp.float32).reshape(blocks[0], split[0], blocks[1], split[1])
        dense = values * self.scale.astype(jnp.float32)[:, None, :, None]
        return dense.reshape(inputs, outputs).astype(self.dtype)

    def specs(self, spec: Any) -> Any:
        # A dimension of a single block is replicated.
        of_scale: Any = P(*(axis if size > 1 else None for size, axis in zip(self.scale.shape, spec, strict=False)))
        return dataclasses.replace(self, values=spec, scale=of_scale)

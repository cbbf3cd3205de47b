"""Weight matrices that memory holds output-first, [O, I]: embedding tables, and weights of float32 products on CPU."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain, streamed
from pallas_kernels.weights import Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputFirst(Weight):
    """A weight matrix that is stored output-first, such as an embedding table that is also the output head.

    array: [O, I], the stored matrix.
    """

    form: ClassVar[str] = "output_first"
    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[::-1]

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        return plain.dot(x, self.array, 1, dtype)

    def dense(self) -> jax.Array:
        return self.array.T.astype(self.dtype)

    def specs(self, spec: Any) -> Any:
        turned: Any = P(*reversed((*spec, None, None)[:2]))
        return dataclasses.replace(self, array=turned)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streamed(OutputFirst):
    """A weight matrix that a CPU reads row by row for float32 products (`pallas_kernels/streamed.py`).

    array: [O, I], the stored matrix: float32, or bfloat16 if that represents the same values exactly, in half of the
      bytes.
    """

    form: ClassVar[str] = "streamed"
    dtype: ClassVar[Any] = jnp.dtype(jnp.float32)

    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        if x.dtype != self.dtype:
            return super().matmul(x, dtype)
        return streamed.product(x, self.array).astype(dtype)

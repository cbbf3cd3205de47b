"""The forms in which memory holds a matrix [I, O] that products read.

A plain array [I, O] is the dense form. Every other form is a class derived from `Weight`, in a file of this folder. A
kernel names the forms that it reads, besides plain arrays, in `READS` of its file (`pallas_kernels/forms.py`). Whatever
no kernel reads is computed by the form's own `matmul`.
"""

import abc
import math
from types import EllipsisType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain
from pallas_kernels.device import Device


class Weight(abc.ABC):
    """A matrix [I, O] in a form of its own. Derived classes are frozen dataclasses registered as pytrees.

    form: the name of the form, as `READS` of a kernel has it.
    """

    form: ClassVar[str]
    ndim: ClassVar[int] = 2

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(I, O), whatever the arrays' own shapes are."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the activations that it is multiplied with."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return nbytes(self)

    def __getitem__(self, index: EllipsisType) -> "Weight":
        """Return the weight itself for `[...]`, by which a module reads the value of an nnx variable."""
        if index is not Ellipsis:
            raise TypeError(f"{type(self).__name__} has no parts that an index could name: only [...] is allowed")
        return self

    @abc.abstractmethod
    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Multiply x [..., I] with the matrix -> [..., O] in this dtype."""

    @abc.abstractmethod
    def dense(self) -> jax.Array:
        """Return the matrix as a plain array [I, O] of its dtype."""

    @abc.abstractmethod
    def specs(self, spec: P) -> Any:
        """Return the same tree with the partition of each array in its place; spec: that of [I, O]."""


AnyWeight = jax.Array | Weight


def product(x: jax.Array, weight: AnyWeight, *, dtype: Any = None, device: Device | None = None) -> jax.Array:
    """Multiply x [..., I] with a weight [I, O] -> [..., O]. Every product of a model goes through here or a kernel.

    Args:
      dtype: of the result; None for that of x. Products of float32 are computed in full precision.
      device: what the program is compiled for, where that is known.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    if isinstance(weight, Weight):
        matmul = lambda rows: weight.matmul(rows, dtype)
    else:
        matmul = lambda rows: plain.dot(rows, weight, 0, dtype)
    # A GPU's compiler makes a slow reduction of a product with a single row.
    return plain.as_few_rows(matmul, x) if device is not None and device.platform == "gpu" else matmul(x)


def dense(weight: AnyWeight) -> jax.Array:
    """Return any weight as a plain array [I, O]."""
    return weight.dense() if isinstance(weight, Weight) else weight


def specs(weight: AnyWeight, spec: P) -> Any:
    """Return the partition of each array of a weight; spec: that of [I, O]."""
    return weight.specs(spec) if isinstance(weight, Weight) else spec


def nbytes(weight: Any) -> int:
    """Count the bytes that memory holds of a weight, of its abstract form, or of any tree of them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))

"""The forms in which memory holds a weight matrix [I, O].

A plain array [I, O] is the dense form. Every other form is a class derived from `Weight`, in a file of this folder. A
kernel names the forms that it reads, besides plain arrays, in `READS` of its file (`pallas_kernels/forms.py`). Forms
that no kernel reads are multiplied by their own `matmul`.
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

    form: the form's name, to be listed in `READS` of a kernel.
    """

    form: ClassVar[str]
    ndim: ClassVar[int] = 2

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape (I, O), whatever the shapes of the arrays are."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the activations that the matrix is multiplied with."""

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays of the weight."""
        return nbytes(self)

    def __getitem__(self, index: EllipsisType) -> "Weight":
        """Return the weight itself for `[...]`, the index with which a module reads the value of an nnx variable."""
        if index is not Ellipsis:
            raise TypeError(f"{type(self).__name__} has no parts that an index could name: only [...] is allowed")
        return self

    @abc.abstractmethod
    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Multiply x [..., I] with the matrix. Return [..., O] in this dtype."""

    @abc.abstractmethod
    def dense(self) -> jax.Array:
        """Return the matrix as a plain array [I, O] in the dtype of the weight."""

    @abc.abstractmethod
    def specs(self, spec: P) -> Any:
        """Return the same tree with partition specs in place of the arrays; spec: the partition of [I, O]."""


AnyWeight = jax.Array | Weight


def product(x: jax.Array, weight: AnyWeight, *, dtype: Any = None, device: Device | None = None) -> jax.Array:
    """Multiply x [..., I] with a weight [I, O]. Return [..., O].

    Every product of a model uses this function or a kernel. Products of float32 are computed in full precision.

    Args:
      x: activations [..., I].
      weight: matrix [I, O] in any form.
      dtype: dtype of the result; None for the dtype of x.
      device: the device that the program is compiled for, if it is known.
    """
    dtype = jnp.dtype(dtype or x.dtype)

    def matmul(rows: jax.Array) -> jax.Array:
        if isinstance(weight, Weight):
            return weight.matmul(rows, dtype)
        return plain.dot(rows, weight, 0, dtype)

    # A GPU's compiler turns a product with a single row into a slow reduction.
    return plain.as_few_rows(matmul, x) if device is not None and device.platform == "gpu" else matmul(x)


def dense(weight: AnyWeight) -> jax.Array:
    """Return any weight as a plain array [I, O]."""
    return weight.dense() if isinstance(weight, Weight) else weight


def specs(weight: AnyWeight, spec: P) -> Any:
    """Return the partition of each array of a weight; spec: the partition of [I, O]."""
    return weight.specs(spec) if isinstance(weight, Weight) else spec


def nbytes(weight: Any) -> int:
    """Return the bytes of all arrays of a weight, of its abstract form, or of any tree of weights."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))

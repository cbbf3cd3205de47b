"""The forms in which memory holds a weight matrix [I, O], for example transposed or quantised.

A plain array [I, O] is the dense form. Every other form is a class derived from `Weight`, in a file of this folder. A
kernel's module names the forms that the kernel reads, besides plain arrays, in its constant `READS` (see
`pallas_kernels/forms.py`). If no kernel reads a form, its own method `matmul` computes products.
"""

import abc
import dataclasses
import functools
import math
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import plain
from pallas_kernels.device import Device

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # largest absolute value of a quantised number, by dtype
TINY = 2.0**-126  # least scale of a row of activations, the least normal float32; its reciprocal is finite
W = TypeVar("W", bound="Weight")


class Weight(abc.ABC):
    """Base class of weight matrices [I, O] that are not stored as a plain array.

    Derived classes are frozen dataclasses registered as pytrees.

    form: name of the form, which the constant `READS` of a kernel's module may list.
    """

    form: ClassVar[str]
    ndim: ClassVar[int] = 2

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape (I, O) of the matrix, whatever the shapes of the stored arrays are."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the activations with which the matrix is multiplied."""

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all stored arrays together."""
        return nbytes(self)

    def in_form(self, form: type[W], **changed: Any) -> W:
        """Return the weight as an object of the class `form`, which has the same fields, with these fields changed."""
        own: Any = self
        return form(**{field.name: getattr(self, field.name) for field in dataclasses.fields(own)} | changed)

    def __getitem__(self, index: EllipsisType) -> "Weight":
        """Return the weight itself for the index `[...]`, with which an nnx module reads the value of a variable."""
        if index is not Ellipsis:
            raise TypeError(f"{type(self).__name__} has no parts that an index could name: only [...] is allowed")
        return self

    @abc.abstractmethod
    def matmul(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Multiply x [..., I] with the matrix. Return [..., O] in `dtype`."""

    def matmul_on(self, device: Device, x: jax.Array, dtype: Any) -> jax.Array:
        """Compute `matmul` on a known device. Derived classes may use kernels for a part of it."""
        return self.matmul(x, dtype)

    @abc.abstractmethod
    def dense(self) -> jax.Array:
        """Return the matrix as a plain array [I, O] in the weight's `dtype`."""

    @abc.abstractmethod
    def specs(self, spec: P) -> Any:
        """Return a weight with partition specs in place of its arrays. spec: the partition spec of the axes [I, O]."""


AnyWeight = jax.Array | Weight


class Prepared(NamedTuple):
    """Activations x [..., I] as the kernel before a product stores them, with what else the product reads.

    rows: [..., I], x; not yet multiplied by 1 / rms of its norm if `squares` is given.
    sums: [..., S] in the dtype of rows, sums over groups of inputs (`interleaved_grouped.summed`); or None.
    squares: f32[..., N], which add up to the mean square rms**2, epsilon included; or None.
    """

    rows: jax.Array
    sums: jax.Array | None = None
    squares: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x."""
        return self.rows.shape

    def plain(self) -> jax.Array:
        """Return x as an array."""
        if self.squares is None:
            return self.rows
        factor = jax.lax.rsqrt(self.squares.sum(-1, keepdims=True))
        return (self.rows.astype(jnp.float32) * factor).astype(self.rows.dtype)


def product(x: Any, weight: AnyWeight, *, dtype: Any = None, device: Device | None = None) -> jax.Array:
    """Multiply x [..., I] with a weight [I, O]. Return [..., O].

    Every matrix product of a model uses this function or a kernel. Float32 products are computed in full precision.

    Args:
      x: activations [..., I]; for a weight that rounds activations, also the tuple that `round_rows` returns; or a
        `Prepared`, whose sums only a kernel of its own reads.
      weight: matrix [I, O], a plain array or any `Weight`.
      dtype: dtype of the result; None for the dtype of x.
      device: the device that the program is compiled for, if it is known.
    """
    if isinstance(x, Prepared):
        x = x.plain()
    if isinstance(x, tuple):
        return weight.of_rounded(*x, weight.dtype)  # type: ignore[union-attr,no-any-return]
    dtype = jnp.dtype(dtype or x.dtype)

    def matmul(rows: jax.Array) -> jax.Array:
        if isinstance(weight, Weight):
            return weight.matmul_on(device, rows, dtype) if device is not None else weight.matmul(rows, dtype)
        return plain.dot(rows, weight, 0, dtype)

    # XLA on a GPU turns a product with a single row of x into a slow reduction, so a single row is padded.
    return plain.as_few_rows(matmul, x) if device is not None and device.platform == "gpu" else matmul(x)


def dense(weight: AnyWeight) -> jax.Array:
    """Return a weight of any form as a plain array [I, O]."""
    return weight.dense() if isinstance(weight, Weight) else weight


def specs(weight: AnyWeight, spec: P) -> Any:
    """Return the partition spec of each array of a weight. spec: the partition spec of the axes [I, O]."""
    return weight.specs(spec) if isinstance(weight, Weight) else spec


def shardings(weight: AnyWeight, sharding: Any) -> Any:
    """Return the sharding of each array of a weight. sharding: the sharding of a plain array [I, O]."""
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda _: sharding, weight)
    place = functools.partial(NamedSharding, sharding.mesh)
    return jax.tree.map(place, specs(weight, sharding.spec), is_leaf=lambda x: isinstance(x, P))


def nbytes(weight: Any) -> int:
    """Return the number of bytes of all arrays of a weight, or of any pytree of weights. Arrays may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))

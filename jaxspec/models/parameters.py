"""The declaration of a parameter: all facts about it besides its values. nnx modules declare their parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

Kind = Literal["matrix", "table", "bias", "norm", "ids"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The declaration of a parameter. With shape, dtype and sharding, JAX accepts it as an abstract array.

    kind: "matrix" [I, O] of a product; "table", whose rows are looked up; "bias"; "norm"; "ids" (token ids as values).
    axes: logical axis (`jaxspec.parallel.placement`) of each dimension; None for a dimension that is not sharded.
    parts: for a parameter merged from several tensors, (name, columns in each group of columns) of each of its parts
      (`LayerConfig.qkv_parts`).
    copies: (name, number of copies) of each part whose key-value heads are copied (`jaxspec.models.sharding`).
    head: whether the parameter is a matrix of the output head, or the embedding table in its place.
    from_target: whether the parameter belongs to the target, and is not in the draft's checkpoint.
    whole: whether checkpoints store a norm's scale as it is, although they store w for norms that multiply by 1 + w.
    """

    shape: tuple[int, ...]
    dtype: Any
    kind: Kind
    axes: tuple[str | None, ...]
    parts: tuple[tuple[str, int], ...] = ()
    copies: tuple[tuple[str, int], ...] = ()
    head: bool = False
    from_target: bool = False
    whole: bool = False
    sharding: Any = None

    @property
    def is_quantised(self) -> bool:
        """True for a parameter that a quantised model holds in 8 bits: a matrix of products, except the output head."""
        return self.kind == "matrix" and not self.head

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        result: int = self.size * self.dtype.itemsize
        return result

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the part of the parameter that each device holds."""
        return self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)

    @property
    def trained(self) -> bool:
        """Return whether training changes the parameter."""
        return self.kind != "ids" and not self.from_target


def declare(kind: Kind, dtype: Any = None) -> Callable[..., nnx.Variable[Any]]:
    """Return a function that makes an nnx variable of this kind from a shape and other fields of `Parameter`.

    Norms are float32 for any dtype, because they are small and Gemma's 1 + w needs the precision. Ids are int32.
    """
    own = {"norm": jnp.float32, "ids": jnp.int32}.get(kind, dtype)

    def variable(
        *shape: int,
        axes: tuple[str | None, ...] = (),
        parts: Mapping[str, int] | None = None,
        copies: Mapping[str, int] | None = None,
        **flags: bool,
    ) -> nnx.Variable[Any]:
        declared = Parameter(
            shape,
            jnp.dtype(own),
            kind,
            axes=axes or (None,) * len(shape),
            parts=tuple((parts or {}).items()),
            copies=tuple((part, n) for part, n in (copies or {}).items() if n > 1),
            **flags,
        )
        variable_type = nnx.Param if declared.trained else nnx.Variable
        return variable_type(jnp.zeros(shape, own), declared=declared)

    return variable

"""The declaration of a parameter: all facts about it beside its values. nnx modules make it; other code reads it."""

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
    """An abstract array with its declaration. It has shape, dtype and sharding, so that JAX accepts it as an array.

    kind: "matrix" [I, O] of a product; "table", whose rows are looked up; "bias"; "norm"; "ids" of another vocabulary.
    axes: logical axis (`jaxspec.parallel.placement`) of each dimension; None for a dimension that is not sharded.
    parts: for a merge of several tensors, each part's name and its columns in a group (see `LayerConfig.qkv_parts`).
    copies: for parts that repeat each group of the checkpoint, the part's name and the number of copies.
    head: whether only the computation of logits reads it.
    from_target: whether it is the target's parameter, which a draft's checkpoint does not hold.
    """

    shape: tuple[int, ...]
    dtype: Any
    kind: Kind
    axes: tuple[str | None, ...]
    parts: tuple[tuple[str, int], ...] = ()
    copies: tuple[tuple[str, int], ...] = ()
    head: bool = False
    from_target: bool = False
    sharding: Any = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def trained(self) -> bool:
        """Return whether training changes the parameter."""
        return self.kind != "ids" and not self.from_target


def declare(kind: Kind, dtype: Any = None) -> Callable[..., nnx.Variable]:
    """Return a function from a shape, and other fields of `Parameter`, to an nnx variable of this kind.

    Norms are float32 whatever the dtype, because they are small and Gemma's 1 + w needs the precision. Ids are int32.
    """
    own = {"norm": jnp.float32, "ids": jnp.int32}.get(kind, dtype)

    def variable(
        *shape: int,
        axes: tuple[str | None, ...] = (),
        parts: Mapping[str, int] | None = None,
        copies: Mapping[str, int] | None = None,
        **flags: bool,
    ):
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

"""What is known of a parameter beside its numbers: said where the nnx module declares it, derived everywhere else."""

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
    """An abstract array. JAX, which asks for shape, dtype and sharding, takes it for one.

    kind: "matrix", [I, O] of a product; "table", whose rows are looked up; "bias"; "norm"; "ids" of another vocabulary.
    axes: of each dimension the logical axis (`jaxspec.parallel.placement`), None where it is not cut.
    parts: where it merges several of a checkpoint's, each with its columns in a group (see `LayerConfig.qkv_parts`).
    copies: part -> how often it holds each of the checkpoint's groups of that part, where not once.
    head: whether it is read for logits only.
    borrowed: whether it is the target's, so that no draft's checkpoint has it.
    """

    shape: tuple[int, ...]
    dtype: Any
    kind: Kind
    axes: tuple[str | None, ...]
    parts: tuple[tuple[str, int], ...] = ()
    copies: tuple[tuple[str, int], ...] = ()
    head: bool = False
    borrowed: bool = False
    sharding: Any = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def trained(self) -> bool:
        return self.kind != "ids" and not self.borrowed


def declare(kind: Kind, dtype: Any = None) -> Callable[..., nnx.Variable]:
    """shape, and what else `Parameter` holds -> a variable of that kind, which knows it. All have dtype but norms and
    ids: norms are small, and Gemma's 1 + w needs the bits."""
    own = {"norm": jnp.float32, "ids": jnp.int32}.get(kind, dtype)

    def variable(
        *shape: int,
        axes: tuple[str | None, ...] = (),
        parts: Mapping[str, int] | None = None,
        copies: Mapping[str, int] | None = None,
        **known: bool,
    ):
        axes, merged = axes or (None,) * len(shape), tuple((parts or {}).items())
        several = tuple((part, n) for part, n in (copies or {}).items() if n > 1)
        declared = Parameter(shape, jnp.dtype(own), kind, axes, merged, several, **known)
        return (nnx.Param if declared.trained else nnx.Variable)(jnp.zeros(shape, own), declared=declared)

    return variable

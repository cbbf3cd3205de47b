"""How parameters lie in memory. Their matrices are [I, O] everywhere; on CPU, programs would rather read columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, compute_dtype, parameters
from jaxspec.models.layers import Backend


@jax.tree_util.register_pytree_node_class
class OutputFirst(Mapping[str, jax.Array]):
    """Parameters whose matrices [I, O] lie as [O, I]. In a program, to see one as [I, O] costs nothing."""

    def __init__(self, stored: dict[str, jax.Array], matrices: frozenset[str]) -> None:
        self.stored, self.matrices = stored, matrices

    def __getitem__(self, name: str) -> jax.Array:
        return self.stored[name].T if name in self.matrices else self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], tuple[str, ...]]]:
        return tuple(self.stored.values()), (
            tuple(self.stored),
            tuple(sorted(self.matrices)),
        )  # in the same order always

    @classmethod
    def tree_unflatten(cls, known: tuple[tuple[str, ...], tuple[str, ...]], values: tuple[Any, ...]) -> OutputFirst:
        names, matrices = known
        return cls(dict(zip(names, values, strict=True)), frozenset(matrices))


def stored_for(backend: Backend, config: ModelConfig, params: Params) -> Params:
    """params as the programs of this backend read them fastest.

    A dict is emptied on the way, so that memory never holds both forms: give a copy of one that is used elsewhere.
    """
    if not isinstance(params, dict) or not backend.streams or compute_dtype(params) != jnp.float32:
        return params
    turning = matrices(config)
    turned = lambda name, x: x.T.block_until_ready() if name in turning else x
    return OutputFirst({name: turned(name, params.pop(name)) for name in list(params)}, turning)


def matrices(config: ModelConfig) -> frozenset[str]:
    """The names of what is turned; tables lie well."""
    return frozenset(name for name, p in parameters(config).items() if p.kind == "matrix")

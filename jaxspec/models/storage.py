"""How parameters lie in memory. Their matrices are [I, O] everywhere; on CPU, programs would rather read columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.decoder import Params
from jaxspec.models.layers import Backend

MATRICES = ("qkv", "out", "gate_up", "down", "embed_in", "head", "rare_in", "rare_head")  # the table lies well


@jax.tree_util.register_pytree_node_class
class OutputFirst(Mapping[str, jax.Array]):
    """Parameters whose matrices [I, O] lie as [O, I]. In a program, to see one as [I, O] costs nothing."""

    def __init__(self, stored: dict[str, jax.Array]) -> None:
        self.stored = stored

    def __getitem__(self, name: str) -> jax.Array:
        return self.stored[name].T if is_matrix(name) else self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(self.stored.values()), tuple(self.stored)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: tuple[Any, ...]) -> OutputFirst:
        return cls(dict(zip(names, values, strict=True)))


def is_matrix(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in MATRICES


def stored_for(backend: Backend, params: Params) -> Params:
    """params as the programs of this backend read them fastest.

    A dict is emptied on the way, so that memory never holds both forms: give a copy of one that is used elsewhere.
    """
    if not isinstance(params, dict) or not backend.streams or params["embed"].dtype != jnp.float32:
        return params
    return OutputFirst({name: turned(name, params.pop(name)) for name in list(params)})


def turned(name: str, x: jax.Array) -> jax.Array:
    return x.T.block_until_ready() if is_matrix(name) else x

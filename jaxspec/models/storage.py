"""How parameters lie in memory. Their matrices are [I, O] everywhere; on CPU, programs would rather read columns, and
half as many bytes where these hold the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, compute_dtype, parameters
from jaxspec.models.layers import Backend
from pallas_kernels.streamed import num_streams


@jax.tree_util.register_pytree_node_class
class OutputFirst(Mapping[str, jax.Array]):
    """Parameters whose matrices [I, O] lie as [O, I]. In a program, to see one as [I, O] costs nothing. Programs
    compute in float32, whatever is read in bfloat16."""

    computes_in = jnp.dtype(jnp.float32)

    def __init__(self, stored: dict[str, jax.Array], matrices: frozenset[str]) -> None:
        self.stored, self.matrices = stored, matrices

    def __getitem__(self, name: str) -> jax.Array:
        return self.stored[name].T if name in self.matrices else self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def narrow(self) -> bool:
        """Whether products read bfloat16."""
        return any(x.dtype == jnp.bfloat16 for x in self.stored.values())

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
    turning, streamed = matrices(config), products(config)
    turned = lambda name, x: x.T.block_until_ready() if name in turning else x
    found = {name: turned(name, params.pop(name)) for name in list(params)}
    read = [name for name in found if name in streamed and streams_alone(found[name])]
    if all(same_in_bfloat16(found[name]) for name in read):
        for name in read:  # one after the other: memory holds one of them twice
            found[name] = found[name].astype(jnp.bfloat16).block_until_ready()
    return OutputFirst(found, turning)


def matrices(config: ModelConfig) -> frozenset[str]:
    """The names of what is turned; tables lie well."""
    return frozenset(name for name, p in parameters(config).items() if p.kind == "matrix")


def products(config: ModelConfig) -> frozenset[str]:
    """The names of what products read: a table only where it is the head."""
    return frozenset(name for name, p in parameters(config).items() if p.kind == "matrix" or p.head)


def streams_alone(matrix: jax.Array) -> bool:
    """Whether a product streams it for one row of x, too: what it reads by the library would be widened each time."""
    return num_streams(1, *reversed(matrix.shape)) > 1


@jax.jit
def same_in_bfloat16(x: jax.Array) -> jax.Array:
    """Whether these are the numbers of a checkpoint in bfloat16."""
    return jnp.all(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) == x)

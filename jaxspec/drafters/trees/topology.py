"""The shape of a tree of drafts: who comes after whom. Place 0 is the pending token, the drafts are its descendants."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Topology:
    """T = K + 1 places of each row, each after its parent; none is deeper than D.

    parents i32[B,T]: the place before each; of place 0 itself.
    ancestors bool[B,T,T]: which places each comes after, itself included.
    depth i32[B,T]: 0 of place 0.
    paths i32[B,T,D+1]: the places from 0 to each, by depth; beyond its own depth 0.
    """

    parents: jax.Array
    ancestors: jax.Array
    depth: jax.Array
    paths: jax.Array


def topology(parents: Int[Array, "B T"], most: int) -> Topology:
    """Of these parents, no place being deeper than `most`."""
    num_places = parents.shape[1]
    place = jnp.arange(num_places, dtype=jnp.int32)
    ancestors = (place == parents[:, :, None]) | jnp.eye(num_places, dtype=bool)
    reach = 1
    while reach < most:  # twice as far each time
        ancestors, reach = joined(ancestors, ancestors), 2 * reach
    depth = jnp.sum(ancestors, axis=2, dtype=jnp.int32) - 1
    there = ancestors[:, :, None, :] & (depth[:, None, None, :] == jnp.arange(most + 1)[:, None])  # [B,T,D+1,T]
    return Topology(parents, ancestors, depth, jnp.sum(jnp.where(there, place, 0), axis=3, dtype=jnp.int32))


def take(x: Shaped[Array, "B T *rest"], places: Int[Array, "B N"]) -> Shaped[Array, "B N *rest"]:
    """x at these places of its second axis."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def joined(first: Bool[Array, "B T T"], then: Bool[Array, "B T T"]) -> Bool[Array, "B T T"]:
    """Whether there is a place between: the product of two relations."""
    return jnp.any(first[:, :, :, None] & then[:, None], axis=2)

"""The topology of a tree of drafts. Place 0 is the pending token, and the drafts are its descendants."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Topology:
    """The T = K + 1 places of each row's tree, of depth at most D.

    parents i32[B,T]: parent of each place; place 0 is its own parent.
    ancestors bool[B,T,T]: whether the second place is an ancestor of the first, or the first itself.
    depth i32[B,T]: depth of each place; 0 for place 0.
    paths i32[B,T,D+1]: the places from place 0 to each, by depth; 0 beyond the place's own depth.
    """

    parents: jax.Array
    ancestors: jax.Array
    depth: jax.Array
    paths: jax.Array


def topology(parents: Int[Array, "B T"], most: int) -> Topology:
    """Return depths, ancestors and paths of a tree, given the parent of each node. most: D, the maximum depth."""
    num_places = parents.shape[1]
    place = jnp.arange(num_places, dtype=jnp.int32)
    ancestors = (place == parents[:, :, None]) | jnp.eye(num_places, dtype=bool)
    reach = 1
    while reach < most:  # each iteration doubles the distance of the ancestors found
        ancestors = joined(ancestors, ancestors)
        reach *= 2
    depth = jnp.sum(ancestors, axis=2, dtype=jnp.int32) - 1
    on_path = ancestors[:, :, None, :] & (depth[:, None, None, :] == jnp.arange(most + 1)[:, None])  # [B,T,D+1,T]
    paths = jnp.sum(jnp.where(on_path, place, 0), axis=3, dtype=jnp.int32)
    return Topology(parents, ancestors, depth, paths)


def take(x: Shaped[Array, "B T *rest"], places: Int[Array, "B N"]) -> Shaped[Array, "B N *rest"]:
    """Return x at these places of its second axis."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def joined(first: Bool[Array, "B T T"], then: Bool[Array, "B T T"]) -> Bool[Array, "B T T"]:
    """Return the product of two relations: whether some place between relates the first and the last."""
    return jnp.any(first[:, :, :, None] & then[:, None], axis=2)

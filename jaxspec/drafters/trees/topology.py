"""The topology of a tree of draft tokens.

Node 0, the root, is the pending token (accepted, not yet read by the target). The drafts are its descendants.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Topology:
    """The T = K + 1 nodes of each row's draft tree, of depth at most D. Node 0 is the root.

    parents i32[B,T]: index of each node's parent; node 0 is its own parent.
    ancestors bool[B,T,T]: whether the node of the last axis is an ancestor of the node of the middle axis, or the same.
    depth i32[B,T]: depth of each node; 0 for node 0.
    paths i32[B,T,D+1]: indices of the nodes from node 0 to each node, by depth; 0 beyond the node's own depth.
    """

    parents: jax.Array
    ancestors: jax.Array
    depth: jax.Array
    paths: jax.Array


def topology(parents: Int[Array, "B T"], most: int) -> Topology:
    """Return the topology of a tree, given the parent of each node. most: D, the maximum depth."""
    num_places = parents.shape[1]
    place = jnp.arange(num_places, dtype=jnp.int32)
    ancestors = (place == parents[:, :, None]) | jnp.eye(num_places, dtype=bool)
    reach = 1
    while reach < most:  # each iteration doubles the distance up to which `ancestors` is complete
        ancestors = joined(ancestors, ancestors)
        reach *= 2
    depth = jnp.sum(ancestors, axis=2, dtype=jnp.int32) - 1
    on_path = ancestors[:, :, None, :] & (depth[:, None, None, :] == jnp.arange(most + 1)[:, None])  # [B,T,D+1,T]
    paths = jnp.sum(jnp.where(on_path, place, 0), axis=3, dtype=jnp.int32)
    return Topology(parents, ancestors, depth, paths)


def take(x: Shaped[Array, "B T *rest"], places: Int[Array, "B N"]) -> Shaped[Array, "B N *rest"]:
    """Return the elements of x at these indices of its second axis, for each row."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def joined(first: Bool[Array, "B T T"], then: Bool[Array, "B T T"]) -> Bool[Array, "B T T"]:
    """Return the composition of two relations between nodes.

    Nodes a and c are related if `first` relates a to some node b, and `then` relates b to c.
    """
    return jnp.any(first[:, :, :, None] & then[:, None], axis=2)

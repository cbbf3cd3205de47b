"""LayerCache: the cache of one layer."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax


class Moves(NamedTuple):
    """Moves of the accepted path of a tree into the slots that a chain would use.

    source i32[B,D]: positions at which the pass has written the tokens of the path.
    slots i32[B*D]: destination slots; the pad slot for a token that is not kept or is there already.
    """

    source: jax.Array
    slots: jax.Array


class Kept(NamedTuple):
    """The tokens of a target pass that are kept.

    num_kept i32[B]: number of kept tokens, the pending token included.
    block_table i32[B,N]: page ids.
    moves: moves after a pass over a tree; None for a chain.
    """

    num_kept: jax.Array
    block_table: jax.Array
    moves: Moves | None = None


class LayerCache(abc.ABC):
    """The cache of one layer for all rows: a pytree of arrays that the layer's mixer updates in each pass."""

    @abc.abstractmethod
    def keep(self, kept: Kept, backend: Any) -> LayerCache:
        """Return the cache after a pass of which only some tokens are kept."""

"""LayerCache: what a layer remembers of the rows."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax


class Moves(NamedTuple):
    """Where the accepted path of a tree stands, and where a chain's tokens would.

    source i32[B,D]: positions at which the pass has written the path's tokens.
    slots i32[B*D]: the slots of a chain; the pad slot for what does not stay, or stands there already.
    """

    source: jax.Array
    slots: jax.Array


class Kept(NamedTuple):
    """Which tokens of a target pass stay.

    num_kept i32[B]: how many, from the pending token on.
    block_table i32[B,N]: page ids.
    moves: of a pass over a tree; None for a chain.
    """

    num_kept: jax.Array
    block_table: jax.Array
    moves: Moves | None = None


class LayerCache(abc.ABC):
    """What a layer remembers of the rows: a pytree of arrays, written by the layer's mixer in each pass."""

    @abc.abstractmethod
    def keep(self, kept: Kept, backend: Any) -> LayerCache:
        """Return the cache as it is after a pass of which only some tokens stay."""

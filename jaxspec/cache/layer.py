"""LayerCache: the cache of one layer, and LayerLayout, its shape."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxspec.parallel.placement import Placement


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
    """The cache of one layer for all rows: a pytree of arrays that the layer's mixer updates in each pass.

    The first axis of each array is the page. A mixer may return a cache of another class from a pass; its `keep`, which
    follows each pass of the target, returns one of the first class again.
    """

    @abc.abstractmethod
    def keep(self, kept: Kept, backend: Any) -> LayerCache:
        """Return the cache after a pass of which only some tokens are kept."""


class LayerLayout(abc.ABC):
    """The shape of one layer's cache, which the layer's mixer declares. Static and hashable.

    by_position: whether each position has an entry of its own, as keys and values have. If not, a page holds the row's
      state after the last position that the row has written in this page.
    """

    by_position: ClassVar[bool] = True

    @abc.abstractmethod
    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page."""

    @abc.abstractmethod
    def stored_bytes(self, page_size: int, num_devices: int, platform: str) -> int:
        """Return the bytes of a page in the memory of each device."""

    @abc.abstractmethod
    def empty(self, num_pages: int, page_size: int) -> Any:
        """Return a zeroed cache."""

    @abc.abstractmethod
    def spec(self, placement: Placement) -> PartitionSpec:
        """Return the partition spec of the cache's arrays."""

"""LayerCache, the cache of one layer (such as its keys and values), and LayerLayout, the shape of such a cache."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import jax

from jaxspec.parallel.placement import Placement


class Moves(NamedTuple):
    """Moves of cache entries, after a target pass over a tree of draft tokens.

    The entries of the accepted path (from the root to a node) move to the slots that they would have in a chain.

    D is the maximum depth of the tree.

    source i32[B,D]: positions whose slots hold the entries of the path's tokens after the pass.
    slots i32[B*D]: destination slots; the pad slot, which is never written, for a token that need not move.
    window_slots i32[B*D]: destination slots in layers with a window, if these have a pool of their own; else None.
    """

    source: jax.Array
    slots: jax.Array
    window_slots: Any = None


class Kept(NamedTuple):
    """The tokens of a target pass that stay in the text, whose cache entries remain valid.

    num_kept i32[B]: number of tokens whose entries remain valid, the pass's first token (the pending one) included.
    block_table i32[B,N]: page ids.
    moves: moves of entries after a pass over a tree of draft tokens; None for a chain.
    window_table i32[B,N]: page ids of layers with a window, if these have a pool of their own; else None.
    """

    num_kept: jax.Array
    block_table: jax.Array
    moves: Moves | None = None
    window_table: Any = None

    def of_window(self) -> Kept:
        """Return the same for a layer whose pages are in the pool of layers with a window."""
        moves = self.moves and Moves(self.moves.source, self.moves.window_slots)
        return Kept(self.num_kept, self.window_table, moves)


UNLIMITED = (1 << 31) - 1  # number of pages whose ids have 32 bits


class LayerCache(abc.ABC):
    """The cache of one layer for all rows: a pytree of arrays whose first axis is the page.

    The layer's mixer (such as attention) updates the cache in each pass. A mixer may return a cache of another class
    from a pass, as an intermediate form. Its method `keep`, called after each target pass, returns the original class.
    """

    @abc.abstractmethod
    def keep(self, kept: Kept, backend: Any) -> LayerCache:
        """Return the cache after a pass. Only the entries of the kept tokens need to be valid in it."""


class LayerLayout(abc.ABC):
    """The shape of one layer's cache, which the layer's mixer (such as attention) declares. Static and hashable.

    by_position: whether each position has an entry of its own, as keys and values have. If not, as for a recurrent
      state, a page holds the row's state after the last position that the row has written in this page.
    window: number of the last positions whose entries are read; None for all.
    """

    by_position: ClassVar[bool] = True
    window: int | None = None

    @abc.abstractmethod
    def page_bytes(self, page_size: int) -> int:
        """Return the number of bytes of one page, over all devices."""

    @abc.abstractmethod
    def stored_bytes(self, page_size: int, num_devices: int, platform: str) -> int:
        """Return the number of bytes that one page takes in the memory of each device, with the platform's padding."""

    def most_pages(self, page_size: int, num_devices: int, platform: str) -> int:
        """Return the largest number of pages that the platform's kernels can index."""
        return UNLIMITED

    @abc.abstractmethod
    def empty(self, num_pages: int, page_size: int) -> Any:
        """Return a cache of zeros."""

    @abc.abstractmethod
    def spec(self, placement: Placement) -> Any:
        """Return the partition spec of the cache's arrays, or a pytree of one for each array."""

    def stored_as(self, dtype: Any) -> LayerLayout:
        """Return the shape of a cache whose keys and values have this dtype. A layer without them returns itself."""
        return self

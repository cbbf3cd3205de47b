"""The paged cache: one pytree for target and draft.

Target and draft share page ids and block tables; their buffers differ in shape. Rejected tokens are rolled back by
lowering a row's length. Stale slots beyond the length are never read and are overwritten later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P

from jaxspec.cache.layer import Kept, LayerCache
from jaxspec.hardware.platforms import facts
from jaxspec.parallel.placement import Placement, per_shard
from pallas_kernels.kv_write import kv_write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV(LayerCache):
    """Pages with the keys and values of one layer.

    pages: [P, S, 2G, D], keys and values interleaved by head.
    """

    pages: jax.Array

    def keep(self, kept: Kept, backend: Any) -> PagedKV:
        """Return the cache after a pass of which only some tokens are kept.

        The tokens of a chain are in their slots already; those of a tree's accepted path are moved.
        """
        if kept.moves is None:
            return self
        size = self.pages.shape[1]
        page = jnp.take_along_axis(kept.block_table, jnp.clip(kept.moves.source, 0) // size, axis=1, mode="clip")
        slots = jnp.minimum(page, self.pages.shape[0] - 1) * size + kept.moves.source % size

        def shard(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
            kv = jnp.take(pages.reshape(-1, *pages.shape[2:]), source.reshape(-1), axis=0, mode="clip")
            return kv_write(pages, kv, target, **backend.how())

        placement = backend.placement
        if placement is not None:
            shard = per_shard(shard, placement, (placement.of_pages, P(), P()), placement.of_pages)
        return PagedKV(shard(self.pages, slots, kept.moves.slots))


@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """The shape of one layer's keys and values in a page."""

    num_kv_heads: int
    head_dim: int  # padded for the platform
    dtype: Any

    def position_bytes(self) -> int:
        """Return the bytes of the keys and values of one position."""
        result: int = 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return result

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Return the bytes of one position in the memory of each device."""
        stored = facts(platform).stored_heads(2 * self.num_kv_heads // num_devices)
        return self.position_bytes() // (2 * self.num_kv_heads) * stored

    def empty(self, num_pages: int, page_size: int) -> PagedKV:
        """Return zeroed pages."""
        return PagedKV(jnp.zeros((num_pages, page_size, 2 * self.num_kv_heads, self.head_dim), self.dtype))


@dataclasses.dataclass(frozen=True)
class PagedFeatures:
    """The shape of the features of the target's positions in pages [P, S, M]."""

    width: int  # M
    dtype: Any

    def position_bytes(self) -> int:
        """Return the bytes of the features of one position."""
        result: int = self.width * jnp.dtype(self.dtype).itemsize
        return result

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Return the bytes of one position in the memory of each device."""
        return self.position_bytes() // num_devices

    def empty(self, num_pages: int, page_size: int) -> jax.Array:
        """Return zeroed pages."""
        return jnp.zeros((num_pages, page_size, self.width), self.dtype)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The shape of one model's cache, for programs, budget and sharding.

    layers: shape of each layer with a cache (`PagedLayer`, `PagedFeatures`).
    """

    layers: tuple[Any, ...]
    page_size: int
    num_pages: int

    @property
    def pad_slot(self) -> int:
        """The slot number of a token that must not be written. Never -1: negative indices wrap."""
        return self.num_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        result: int = self.page_size * sum(layer.position_bytes() for layer in self.layers)
        return result

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Return the bytes of one page in the memory of each device."""
        result: int = self.page_size * sum(layer.stored_bytes(num_devices, platform) for layer in self.layers)
        return result


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PagedKVCache:
    """Pages of target, draft and features. All use the same page ids and block tables.

    target: caches of the target's layers.
    draft: caches of the draft's layers; empty for a drafter without a cache.
    features: one array [P, S, M] at the slots of the target's keys and values; empty for a drafter that reads none.
    """

    target: tuple[LayerCache, ...]
    draft: tuple[LayerCache, ...] = ()
    features: tuple[jax.Array, ...] = ()


class Layers(Protocol):
    """The part of `ModelConfig` that a cache needs.

    cached_layers: `LayerConfig` of each layer with keys and values of its own.
    """

    @property
    def cached_layers(self) -> Sequence[Any]: ...


def cache_layout(config: Layers, *, page_size: int, num_pages: int, dtype: Any, platform: str) -> CacheLayout:
    """Return the layout of a model's keys and values."""
    head_size = facts(platform).head_size
    layers = tuple(
        PagedLayer(layer.num_kv_heads, head_size(layer.head_dim), jnp.dtype(dtype)) for layer in config.cached_layers
    )
    return CacheLayout(layers, page_size, num_pages)


def features_layout(width: int, *, page_size: int, num_pages: int, dtype: Any) -> CacheLayout:
    """Return the layout of M = width features of each of the target's positions."""
    return CacheLayout((PagedFeatures(width, jnp.dtype(dtype)),), page_size, num_pages)


def copy_pages(
    config: Any, params: Any, cache: PagedKVCache, source: jax.Array, target: jax.Array
) -> tuple[PagedKVCache, None]:
    """Copy the pages source i32[n] to the pages target i32[n]; a target num_pages is dropped."""
    return jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache), None


def pages_format(placement: Placement, rank: int = 4) -> Format:
    """Return the memory layout of pages: row-major, as kernels read them.

    The TPU compiler alone would choose an order with less padding. Each launch would then copy all pages to row-major
    order and back.
    """
    spec = placement.of_pages if rank == 4 else placement.of_features
    return Format(Layout(tuple(range(rank))), placement.sharding(spec))


def allocate(layout: CacheLayout, placement: Placement) -> tuple[Any, ...]:
    """Return zeroed caches of all layers, created on their devices."""

    def zeros() -> tuple[Any, ...]:
        return tuple(layer.empty(layout.num_pages, layout.page_size) for layer in layout.layers)

    formats = jax.tree.map(lambda x: pages_format(placement, x.ndim), jax.eval_shape(zeros))
    result: tuple[Any, ...] = jax.jit(zeros, out_shardings=formats)()
    return result

"""The paged cache: one pytree for both models.

Target and draft share page ids and block tables; their buffers differ in shape. Rolling back rejected tokens is
lowering a row's length: stale slots beyond it are never read and are overwritten later.
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
    """Keys and values of one layer, in the pages of all rows.

    pages: [P, S, 2G, D], keys and values interleaved by head.
    """

    pages: jax.Array

    def keep(self, kept: Kept, backend: Any) -> PagedKV:
        """Return the cache after a pass of which some tokens stay: those of a chain stand where they are."""
        if kept.moves is None:
            return self
        size, table = self.pages.shape[1], kept.block_table
        page = jnp.take_along_axis(table, jnp.clip(kept.moves.source, 0) // size, axis=1, mode="clip")
        slots = jnp.minimum(page, self.pages.shape[0] - 1) * size + kept.moves.source % size

        def shard(pages, source, target):
            kv = jnp.take(pages.reshape(-1, *pages.shape[2:]), source.reshape(-1), axis=0, mode="clip")
            return kv_write(pages, kv, target, **backend.how())

        if (placement := backend.placement) is not None:
            shard = per_shard(shard, placement, (placement.of_pages, P(), P()), placement.of_pages)
        return PagedKV(shard(self.pages, slots, kept.moves.slots))


@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """The shape of one layer's keys and values in a page."""

    num_kv_heads: int
    head_dim: int  # as padded for the platform
    dtype: Any

    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position."""
        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Bytes of one position in the memory of each device."""
        stored = facts(platform).stored_heads(2 * self.num_kv_heads // num_devices)
        return self.position_bytes() // (2 * self.num_kv_heads) * stored

    def empty(self, num_pages: int, page_size: int) -> PagedKV:
        """Return zeroed pages."""
        return PagedKV(jnp.zeros((num_pages, page_size, 2 * self.num_kv_heads, self.head_dim), self.dtype))


@dataclasses.dataclass(frozen=True)
class PagedFeatures:
    """The shape of what a drafter keeps of the target's positions in a page, [P, S, M]."""

    width: int  # M
    dtype: Any

    def position_bytes(self) -> int:
        """Bytes of the features of one position."""
        return self.width * jnp.dtype(self.dtype).itemsize

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Bytes of one position in the memory of each device."""
        return self.position_bytes() // num_devices

    def empty(self, num_pages: int, page_size: int) -> jax.Array:
        """Return zeroed pages."""
        return jnp.zeros((num_pages, page_size, self.width), self.dtype)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The shape of one model's cache, as programs, budget and sharding see it.

    layers: of each layer that remembers something, its shape (`PagedLayer`, `PagedFeatures`).
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
        return self.page_size * sum(layer.position_bytes() for layer in self.layers)

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Bytes of one page in the memory of each device."""
        return self.page_size * sum(layer.stored_bytes(num_devices, platform) for layer in self.layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PagedKVCache:
    """Pages of both models, and of the target's features, under the same ids and block tables.

    target, draft: each a LayerCache a layer that has one; draft is empty where the drafter has none.
    features: one array [P, S, M] where the drafter reads any, at the slots of the target's keys and values.
    """

    target: tuple[LayerCache, ...]
    draft: tuple[LayerCache, ...] = ()
    features: tuple[jax.Array, ...] = ()


class Layers(Protocol):
    """The facts that a cache needs of a model, as `ModelConfig` has them.

    cached_layers: `LayerConfig` of each layer with keys and values of its own.
    """

    @property
    def cached_layers(self) -> Sequence[Any]: ...


def cache_layout(config: Layers, *, page_size: int, num_pages: int, dtype: Any, platform: str) -> CacheLayout:
    """Return the layout of a model's keys and values."""
    padded, dtype = facts(platform).head_size, jnp.dtype(dtype)
    layers = tuple(PagedLayer(x.num_kv_heads, padded(x.head_dim), dtype) for x in config.cached_layers)
    return CacheLayout(layers, page_size, num_pages)


def features_layout(width: int, *, page_size: int, num_pages: int, dtype: Any) -> CacheLayout:
    """Return the layout of M = width features of each of the target's positions."""
    return CacheLayout((PagedFeatures(width, jnp.dtype(dtype)),), page_size, num_pages)


def copy_pages(
    config: Any, params: Any, cache: PagedKVCache, source: jax.Array, target: jax.Array
) -> tuple[PagedKVCache, None]:
    """Copy pages source i32[n] to pages target i32[n]; a target of num_pages is dropped."""
    return jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache), None


def pages_format(placement: Placement, rank: int = 4) -> Format:
    """Return the memory layout of pages: row by row, as kernels read them.

    Left the choice, the TPU compiler takes an order that pads less, and then each launch copies all pages into the
    other and back.
    """
    spec = placement.of_pages if rank == 4 else placement.of_features
    return Format(Layout(tuple(range(rank))), placement.sharding(spec))


def allocate(layout: CacheLayout, placement: Placement) -> tuple[Any, ...]:
    """Return zeroed caches of all layers, made on the devices where they belong."""

    def zeros() -> tuple[Any, ...]:
        return tuple(layer.empty(layout.num_pages, layout.page_size) for layer in layout.layers)

    formats = jax.tree.map(lambda x: pages_format(placement, x.ndim), jax.eval_shape(zeros))
    return jax.jit(zeros, out_shardings=formats)()

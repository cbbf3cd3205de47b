"""The paged KV cache: one pytree with the caches of target, draft and features.

They share page ids and block tables; their arrays differ in shape. The target's layers with a sliding window may have a
smaller pool, with page ids and block tables of its own (`jaxspec.cache.windows`). The keys and values of rejected draft
tokens need no rollback: slots beyond a row's length are never read, and are overwritten later.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P

from jaxspec.cache.layer import UNLIMITED, Kept, LayerCache, LayerLayout
from jaxspec.hardware.platforms import facts, rounded_up
from jaxspec.parallel.placement import Placement, per_shard
from pallas_kernels.kv_write import kv_write
from pallas_kernels.pages import LARGEST, AnyPages, entries, specs, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV(LayerCache):
    """Pages with the keys and values of one layer.

    pages: [P, S, 2G, D]: P pages of S slots, with the keys and values of G heads interleaved by head; a plain array or
      `ScaledPages`.
    """

    pages: AnyPages

    def keep(self, kept: Kept, backend: Any) -> PagedKV:
        """Return the cache after a pass of which only some tokens are kept.

        Entries of a chain of draft tokens are in the right slots already. Entries of a tree's accepted path are moved.
        """
        if kept.moves is None:
            return self
        size = self.pages.shape[1]
        page = jnp.take_along_axis(kept.block_table, jnp.clip(kept.moves.source, 0) // size, axis=1, mode="clip")
        slots = jnp.minimum(page, self.pages.shape[0] - 1) * size + kept.moves.source % size

        def shard(pages: AnyPages, source: jax.Array, target: jax.Array) -> AnyPages:
            return kv_write(pages, entries(pages, source.reshape(-1)), target, **backend.how())

        placement = backend.placement
        if placement is not None:
            of_pages = specs(self.pages, placement.of_pages)
            shard = per_shard(shard, placement, (of_pages, P(), P()), of_pages)
        return PagedKV(shard(self.pages, slots, kept.moves.slots))


@dataclasses.dataclass(frozen=True)
class PagedLayer(LayerLayout):
    """The shape of the keys and values of one layer in pages [P, S, 2 * num_kv_heads, head_dim].

    With a dtype of 8 bits, each key and each value of a head also has a scale in float32 (`ScaledPages`).
    """

    num_kv_heads: int
    head_dim: int  # head size, padded to a size that the platform's kernels support
    dtype: Any
    window: int | None = None

    def page_bytes(self, page_size: int) -> int:
        entry = self.head_dim * jnp.dtype(self.dtype).itemsize + self.scale_bytes
        result: int = page_size * 2 * self.num_kv_heads * entry
        return result

    @property
    def scale_bytes(self) -> int:
        """Number of bytes of the scale of a key or a value of a head; 0 without scales."""
        return 4 if jnp.dtype(self.dtype).name in LARGEST else 0

    def stored_as(self, dtype: Any) -> PagedLayer:
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def stored_bytes(self, page_size: int, num_devices: int, platform: str) -> int:
        heads, itemsize, known = 2 * self.num_kv_heads // num_devices, jnp.dtype(self.dtype).itemsize, facts(platform)
        values: int = page_size * known.stored_rows(heads, itemsize) * self.head_dim * itemsize
        scales: int = rounded_up(page_size * heads, known.lanes) * self.scale_bytes
        return values + scales

    def most_pages(self, page_size: int, num_devices: int, platform: str) -> int:
        limit = facts(platform).most_in_8_bits
        if limit is None or jnp.dtype(self.dtype).itemsize > 1:
            return UNLIMITED
        return limit // (page_size * (2 * self.num_kv_heads // num_devices) * self.head_dim)

    def empty(self, num_pages: int, page_size: int) -> PagedKV:
        return PagedKV(zeros(num_pages, page_size, 2 * self.num_kv_heads, self.head_dim, self.dtype))

    def spec(self, placement: Placement) -> PagedKV:
        pages = jax.eval_shape(lambda: self.empty(1, 1)).pages
        return PagedKV(specs(pages, placement.of_pages))


def paged_layer(num_kv_heads: int, head_dim: int, dtype: Any, platform: str, window: int | None) -> PagedLayer:
    """Return the layout of a layer's keys and values with these heads. The head size is padded for the platform."""
    return PagedLayer(num_kv_heads, facts(platform).head_size(head_dim), jnp.dtype(dtype), window)


@dataclasses.dataclass(frozen=True)
class PagedFeatures(LayerLayout):
    """The shape of the target's features, which a drafter reads, in pages [P, S, M]."""

    width: int  # M, the size of a position's feature vector
    dtype: Any

    def page_bytes(self, page_size: int) -> int:
        result: int = page_size * self.width * jnp.dtype(self.dtype).itemsize
        return result

    def stored_bytes(self, page_size: int, num_devices: int, platform: str) -> int:
        known, itemsize = facts(platform), jnp.dtype(self.dtype).itemsize
        row = rounded_up(-(-self.width // num_devices), known.lanes)
        result: int = known.stored_rows(page_size, itemsize) * row * itemsize
        return result

    def empty(self, num_pages: int, page_size: int) -> jax.Array:
        return jnp.zeros((num_pages, page_size, self.width), self.dtype)

    def spec(self, placement: Placement) -> P:
        return placement.of_features


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The shape of one model's cache. It is static in compiled programs, and determines memory use and sharding.

    layers: shape of the cache of each layer that has one.
    num_window_pages: number of pages of layers with a window; None if these have num_pages, like all other layers.
    """

    layers: tuple[LayerLayout, ...]
    page_size: int
    num_pages: int
    num_window_pages: int | None = None

    @property
    def pad_slot(self) -> int:
        """The slot given to a token whose entry must not be written. It is one past the pool's last slot.

        It is not -1, because negative indices wrap.
        """
        return self.num_pages * self.page_size

    @property
    def window(self) -> int | None:
        """The largest window of the layers that have one; None if none has."""
        return max((layer.window for layer in self.layers if layer.window), default=None)

    @property
    def window_pool(self) -> tuple[int, int] | None:
        """The number of pages of the layers with a window, and their window; None if they have no pool of their own."""
        window = self.window
        return None if self.num_window_pages is None or window is None else (self.num_window_pages, window)

    def in_window_pool(self, layer: LayerLayout) -> bool:
        """Return whether a layer's pages are in the pool of layers with a window."""
        return self.num_window_pages is not None and layer.window is not None

    def pages_of(self, layer: LayerLayout) -> int:
        """Return the number of pages of a layer."""
        if self.num_window_pages is None or layer.window is None:
            return self.num_pages
        return self.num_window_pages

    @property
    def page_bytes(self) -> int:
        """Number of bytes of one page, summed over all layers."""
        return sum(layer.page_bytes(self.page_size) for layer in self.layers)

    @property
    def by_position(self) -> bool:
        """Return whether each position has an entry of its own in the caches of all layers."""
        return all(layer.by_position for layer in self.layers)

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Return the number of bytes that one page takes in the memory of each device, summed over all layers."""
        return sum(layer.stored_bytes(self.page_size, num_devices, platform) for layer in self.layers)

    def window_bytes(self, num_devices: int, platform: str) -> int:
        """Return the part of `stored_bytes` in layers with a window."""
        windowed = dataclasses.replace(self, layers=tuple(layer for layer in self.layers if layer.window))
        return windowed.stored_bytes(num_devices, platform)

    def most_pages(self, num_devices: int, platform: str, *, in_window: bool | None = None) -> int:
        """Return the largest number of pages that the platform's kernels can index, on each device.

        in_window: whether to regard layers with a window, or those without one; None for all.
        """
        layers = [layer for layer in self.layers if in_window is None or in_window == (layer.window is not None)]
        return min((layer.most_pages(self.page_size, num_devices, platform) for layer in layers), default=UNLIMITED)

    def pool_bytes(self, num_devices: int, platform: str) -> int:
        """Return the number of bytes that all pages take in the memory of each device."""
        how = self.page_size, num_devices, platform
        return sum(self.pages_of(layer) * layer.stored_bytes(*how) for layer in self.layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PagedKVCache:
    """The caches of target, draft and features.

    All use the same page ids and block tables. Only the target's layers with a window have their own if they have a
    pool of their own.

    target: caches of the target's layers.
    draft: caches of the draft's layers; empty for a drafter without a cache.
    features: one array [P, S, M] of the target's features, with the features of a position at the slot of its keys and
      values; empty for a drafter that reads no features.
    """

    target: tuple[LayerCache, ...]
    draft: tuple[LayerCache, ...] = ()
    features: tuple[jax.Array, ...] = ()


def features_layout(width: int, *, page_size: int, num_pages: int, dtype: Any) -> CacheLayout:
    """Return the layout of a cache of features, with M = `width` numbers for each of the target's positions."""
    return CacheLayout((PagedFeatures(width, jnp.dtype(dtype)),), page_size, num_pages)


def copy_pages(
    config: Any, params: Any, cache: PagedKVCache, source: jax.Array, target: jax.Array, *windows: jax.Array
) -> tuple[PagedKVCache, None]:
    """Copy the pages source i32[n] to the pages target i32[n], in all caches. A copy to page num_pages is dropped.

    Return the caches, and None, because this program has no other result.

    windows: source and target in the pool of layers with a window, if there is one.
    """

    def copy(cache: Any, source: jax.Array, target: jax.Array) -> Any:
        return jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache)

    copied = copy(cache, source, target)
    if windows:
        layout = config.target.layout
        both = zip(cache.target, copied.target, layout.layers, strict=True)
        layers = (copy(own, *windows) if layout.in_window_pool(layer) else done for own, done, layer in both)
        copied = dataclasses.replace(copied, target=tuple(layers))
    return copied, None


def shapes(layout: CacheLayout, placement: Placement) -> tuple[Any, ...]:
    """Return the shapes and row-major memory layouts of the caches of all layers, without allocating them.

    Kernels need row-major pages. If the TPU compiler chose the layout, it would order the axes for the least padding.
    Each run of a program would then copy all pages to row-major order and back.
    """

    def shape(layer: LayerLayout) -> Any:
        def row_major(spec: P, x: Any) -> Any:
            order = Format(Layout(tuple(range(x.ndim))), placement.sharding(spec))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=order)

        def alike(spec: P, part: Any) -> Any:
            return jax.tree.map(functools.partial(row_major, spec), part)

        caches = jax.eval_shape(lambda: layer.empty(layout.pages_of(layer), layout.page_size))
        return jax.tree.map(alike, layer.spec(placement), caches, is_leaf=lambda x: isinstance(x, P))

    return tuple(map(shape, layout.layers))


def allocate(layout: CacheLayout, placement: Placement) -> tuple[Any, ...]:
    """Return caches of zeros for all layers, created on their devices."""
    result: tuple[Any, ...] = zeroing(layout, placement)()
    return result


@functools.lru_cache(maxsize=64)
def zeroing(layout: CacheLayout, placement: Placement) -> Callable[[], tuple[Any, ...]]:
    """Return a compiled function that creates caches of zeros. Later engines of the same layout compile nothing."""

    def zeros() -> tuple[Any, ...]:
        return tuple(layer.empty(layout.pages_of(layer), layout.page_size) for layer in layout.layers)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.format, shapes(layout, placement)))

"""The paged cache: one pytree for both models.

Target and draft share page ids and block tables; their buffers differ in shape. Rolling back rejected tokens is
lowering a row's length: stale slots beyond it are never read and are overwritten later.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from jaxspec.parallel.placement import Placement
from jaxspec.platforms import facts


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The shape of one model's pages, as cache, kernels, budget and sharding see it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # as padded for the platform
    page_size: int
    num_pages: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[P, S, 2G, D]: keys and values interleaved by head."""
        return (self.num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def pad_slot(self) -> int:
        """The slot number of a token that must not be written. Never -1: negative indices wrap."""
        return self.num_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        per_layer = self.page_size * 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * per_layer * jnp.dtype(self.dtype).itemsize

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Bytes of it in the memory of each device."""
        stored = facts(platform).stored_heads(2 * self.num_kv_heads // num_devices)
        return self.page_bytes // (2 * self.num_kv_heads) * stored


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """The shape of the pages that hold what a drafter keeps of the target's positions."""

    width: int  # M
    page_size: int
    num_pages: int
    dtype: Any
    num_layers: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_pages, self.page_size, self.width)

    def stored_bytes(self, num_devices: int, platform: str) -> int:
        """Bytes of a page in the memory of each device."""
        return self.page_size * self.width // num_devices * jnp.dtype(self.dtype).itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class PagedKVCache:
    """Pages of both models, and of the target's features, under the same ids and block tables.

    target, draft: each a tuple over layers of [P, S, 2G, D]; draft is empty where the drafter has none.
    features: one array [P, S, M] where the drafter reads any, at the slots of the target's keys and values.
    """

    target: tuple[jax.Array, ...]
    draft: tuple[jax.Array, ...] = ()
    features: tuple[jax.Array, ...] = ()


class Cached(Protocol):
    """What a cache has to know of a model, as `ModelConfig` says it.

    cached_layers: that have keys and values.
    head_dim: D, as the model has it.
    """

    @property
    def cached_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def cache_layout(config: Cached, *, page_size: int, num_pages: int, dtype: Any, platform: str) -> CacheLayout:
    return CacheLayout(
        num_layers=config.cached_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=facts(platform).head_size(config.head_dim),
        page_size=page_size,
        num_pages=num_pages,
        dtype=jnp.dtype(dtype),
    )


def copy_pages(
    config: Any, params: Any, cache: PagedKVCache, source: jax.Array, target: jax.Array
) -> tuple[PagedKVCache, None]:
    """Pages source i32[n] copied to pages target i32[n]; a target of num_pages is dropped."""
    return jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache), None


def pages_format(placement: Placement, rank: int = 4) -> Format:
    """Row by row, as kernels read them. Left the choice, the TPU compiler takes an order that pads less, and then each
    launch copies all pages into the other and back."""
    spec = placement.of_pages if rank == 4 else placement.of_features
    return Format(Layout(tuple(range(rank))), placement.sharding(spec))


def allocate(layout: CacheLayout | FeatureLayout, placement: Placement) -> tuple[jax.Array, ...]:
    """Zeroed pages, born where and how they lie."""
    zeros = jax.jit(
        lambda: tuple(jnp.zeros(layout.shape, layout.dtype) for _ in range(layout.num_layers)),
        out_shardings=(pages_format(placement, len(layout.shape)),) * layout.num_layers,
    )
    return zeros()

"""PagedModel: a decoder with a paged KV cache. A pass writes its tokens' keys and values and attends over the pages."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.layer import Kept, LayerCache
from jaxspec.cache.pages import CacheLayout
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, Params, bind
from jaxspec.models.mixers import MIXERS
from jaxspec.models.rows import Rows
from pallas_kernels.slot_mapping import slot_mapping
from pallas_kernels.tree_mask import packed


class Branches(NamedTuple):
    """The tree that the tokens of a pass are nodes of. Cache slots follow the tokens' order in the pass, not depths.

    positions i32[B,T]: positions of the tokens in the text, which follow from the depths of their nodes.
    first i32[B]: position of the slot of the tree's first node, which an earlier pass may have written.
    seen bool[B,T,_]: nodes that each token attends to, which are its ancestors and itself; the last axis begins at the
      tree's first node.
    """

    positions: jax.Array
    first: jax.Array
    seen: jax.Array


class Pass(NamedTuple):
    """The results of a pass of a PagedModel.

    decoder: the decoder bound to its parameters, whose method `logits` computes logits of `hidden`.
    hidden [B,T,E]: output of the last norm.
    pages: updated caches of the layers.
    tapped: inputs [B,T,E] of the layers that the argument `taps` lists.
    slots i32[B*T]: slots of the tokens' keys and values in the cache.
    """

    decoder: Decoder
    hidden: jax.Array
    pages: tuple[LayerCache, ...]
    tapped: tuple[jax.Array, ...]
    slots: jax.Array


@dataclasses.dataclass(frozen=True)
class PagedModel:
    """Static description of a model with a paged KV cache.

    layout: shape of the cache.
    max_model_len: largest number of positions of a row that the model may write.
    backend: device, placement and kernels of its programs.
    """

    config: ModelConfig
    layout: CacheLayout
    max_model_len: int
    backend: Backend

    def forward(
        self,
        params: Params,
        pages: tuple[LayerCache, ...],
        tokens: jax.Array,
        positions: jax.Array,
        masked: jax.Array,
        block_table: jax.Array,
        taps: tuple[int, ...] = (),
        branches: Branches | None = None,
        window_table: jax.Array | None = None,
    ) -> Pass:
        """Run one pass over tokens.

        A row whose tokens are all masked is not computed. In a row, masked tokens may only follow the unmasked ones.

        Args:
          params: parameters of the model, by name.
          pages: caches of the layers, in order.
          tokens: i32[B,T], token ids.
          positions: i32[B,T], positions of the tokens' slots.
          masked: bool[B,T], whether a token is padding, whose keys and values are not written.
          block_table: i32[B,N], page ids.
          taps: indices of layers whose inputs are returned (`Decoder`).
          branches: the tree that the tokens form; None for a chain.
          window_table: i32[B,N], page ids of layers with a window, if these have a pool of their own; else None.
        """
        rows = self.rows(positions, masked, block_table, branches, window_table)
        decoder = bind(self.config, params)
        hidden, pages, tapped = decoder(tokens, pages, rows, self.backend, taps)
        return Pass(decoder, hidden, pages, tapped, rows.slots)

    def rows(
        self,
        positions: jax.Array,
        masked: jax.Array,
        block_table: jax.Array,
        branches: Branches | None = None,
        window_table: jax.Array | None = None,
    ) -> Rows:
        """Return the positions and cache slots of the tokens of a pass. The arguments are those of `forward`."""
        slots = self.slots(positions, masked, block_table)
        in_window = self.window_slots(positions, masked, window_table)
        windows = {"window_slots": in_window, "window_table": window_table}

        def end(length: jax.Array | int) -> jax.Array:
            return jnp.where(masked[:, 0], 0, positions[:, 0] + length)

        kv_len = end(positions.shape[1])
        num_keys = end(jnp.sum(~masked, axis=1, dtype=jnp.int32))
        if branches is None:
            return Rows(positions, slots, block_table, kv_len, num_keys, **windows)
        return Rows(branches.positions, slots, block_table, kv_len, num_keys, packed(*branches), **windows)

    def window_slots(self, positions: jax.Array, masked: jax.Array, window_table: jax.Array | None) -> jax.Array | None:
        """Return the slots of `slots` in layers with a window; None if these have no pool of their own."""
        if window_table is None or self.layout.num_window_pages is None:
            return None
        pad_slot = self.layout.num_window_pages * self.layout.page_size
        return self.slots(positions, masked, window_table, pad_slot)

    def slots(
        self, positions: jax.Array, masked: jax.Array, block_table: jax.Array, pad_slot: int | None = None
    ) -> jax.Array:
        """Return the cache slots i32[B*T] of positions [B,T]; for masked tokens the pad slot, which is not written.

        pad_slot: as `CacheLayout.pad_slot`, which it is if None.
        """
        b, t = positions.shape
        return slot_mapping(
            positions.reshape(-1),
            masked.reshape(-1),
            jnp.arange(b + 1, dtype=jnp.int32) * (t - 1),  # row starts less one token a row, which slot_mapping adds
            block_table,
            page_size=self.layout.page_size,
            max_model_len=self.max_model_len,
            pad_slot=self.layout.pad_slot if pad_slot is None else pad_slot,
            **self.backend.how(),
        )

    def keep(self, cache: tuple[LayerCache, ...], kept: Kept) -> tuple[LayerCache, ...]:
        """Return the caches of all layers after a pass, without the entries of tokens that do not stay in the text."""
        own = (kept.of_window() if self.layout.in_window_pool(layer) else kept for layer in self.layout.layers)
        return tuple(layer.keep(entries, self.backend) for layer, entries in zip(cache, own, strict=True))

    def prefill(
        self,
        params: Params,
        pages: tuple[LayerCache, ...],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        block_table: jax.Array,
        *,
        taps: tuple[int, ...] = (),
        window_table: jax.Array | None = None,
    ) -> Pass:
        """Run `forward` on a prompt chunk: tokens i32[B,T] from position start[b] on, of which length[b] are real."""
        where = places(tokens, start, length)
        done = self.forward(params, pages, tokens, *where, block_table, taps, window_table=window_table)
        return done._replace(pages=self.keep(done.pages, Kept(length, block_table, window_table=window_table)))


def cache_layout(
    config: ModelConfig, *, page_size: int, num_pages: int, dtype: Any, platform: str, kv_dtype: str | None = None
) -> CacheLayout:
    """Return the layout of a model's cache, composed of the layouts that the layers' mixers declare.

    dtype: compute dtype of the model.
    kv_dtype: dtype of stored keys and values; None for the compute dtype.
    """
    layers = [MIXERS[own.mixer].layer_layout(own, dtype, platform) for own in config.cached_layers]
    return CacheLayout(
        tuple(layer.stored_as(kv_dtype) if kv_dtype else layer for layer in layers), page_size, num_pages
    )


def places(tokens: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (positions, whether each is padding) of a prompt chunk. Arguments are as in `PagedModel.prefill`."""
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return start[:, None] + offset, offset >= length[:, None]

"""PagedModel: a decoder with its cache layout. A pass writes the tokens' keys and values and attends over the pages."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.layer import Kept, LayerCache
from jaxspec.cache.pages import CacheLayout
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, Params, bind
from jaxspec.models.rows import Rows
from pallas_kernels.slot_mapping import slot_mapping
from pallas_kernels.tree_mask import packed


class Branches(NamedTuple):
    """Tokens of a pass that are nodes of a tree. Their slots follow their order in the pass, like those of a chain.

    positions i32[B,T]: positions in the text, which follow from the nodes' depths in the tree.
    first i32[B]: position of the slot of the tree's first node, which an earlier pass may have written.
    seen bool[B,T,_]: nodes that each token sees, which are its ancestors and itself; nodes are counted from the first.
    """

    positions: jax.Array
    first: jax.Array
    seen: jax.Array


class Pass(NamedTuple):
    """The results of a pass.

    decoder: the decoder bound to its parameters, for `logits`.
    hidden [B,T,E]: output of the last norm.
    pages: updated caches.
    tapped: inputs [B,T,E] of the layers `taps`.
    slots i32[B*T]: slots of the tokens' keys and values.
    """

    decoder: Decoder
    hidden: jax.Array
    pages: tuple[LayerCache, ...]
    tapped: tuple[jax.Array, ...]
    slots: jax.Array


@dataclasses.dataclass(frozen=True)
class PagedModel:
    """Static description of a model with a paged cache.

    max_model_len: bound of the positions that it may write.
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
    ) -> Pass:
        """Run one pass over tokens.

        A row whose tokens are all masked is not computed. In a row, masked tokens may only follow the unmasked ones.

        Args:
          tokens, positions: i32[B,T].
          masked: bool[B,T], tokens whose keys and values are not written.
          block_table: i32[B,N].
          taps: as in `Decoder`.
          branches: the tokens' places in a tree; None for a chain.
        """
        rows = self.rows(positions, masked, block_table, branches)
        decoder = bind(self.config, params)
        hidden, pages, tapped = decoder(tokens, pages, rows, self.backend, taps)
        return Pass(decoder, hidden, pages, tapped, rows.slots)

    def rows(
        self, positions: jax.Array, masked: jax.Array, block_table: jax.Array, branches: Branches | None = None
    ) -> Rows:
        """Return the positions and slots of the tokens of a pass. The arguments are those of `forward`."""
        slots = self.slots(positions, masked, block_table)

        def end(length: jax.Array | int) -> jax.Array:
            return jnp.where(masked[:, 0], 0, positions[:, 0] + length)

        kv_len = end(positions.shape[1])
        num_keys = end(jnp.sum(~masked, axis=1, dtype=jnp.int32))
        if branches is None:
            return Rows(positions, slots, block_table, kv_len, num_keys)
        return Rows(branches.positions, slots, block_table, kv_len, num_keys, packed(*branches))

    def slots(self, positions: jax.Array, masked: jax.Array, block_table: jax.Array) -> jax.Array:
        """Return the slots i32[B*T] of positions [B,T]; the pad slot for masked tokens."""
        b, t = positions.shape
        return slot_mapping(
            positions.reshape(-1),
            masked.reshape(-1),
            jnp.arange(b + 1, dtype=jnp.int32) * (t - 1),  # row starts before a merge, which adds one token to each row
            block_table,
            page_size=self.layout.page_size,
            max_model_len=self.max_model_len,
            pad_slot=self.layout.pad_slot,
            **self.backend.how(),
        )

    def keep(self, cache: tuple[LayerCache, ...], kept: Kept) -> tuple[LayerCache, ...]:
        """Return the caches of all layers after a pass of which only some tokens are kept."""
        return tuple(layer.keep(kept, self.backend) for layer in cache)

    def prefill(self, params, pages, tokens, start, length, block_table, *, taps: tuple[int, ...] = ()) -> Pass:
        """Run `forward` on a prompt chunk: tokens i32[B,T] from position start[b] on, of which length[b] are real."""
        return self.forward(params, pages, tokens, *places(tokens, start, length), block_table, taps)


def places(tokens: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (positions, whether each is padding) of a prompt chunk, for the arguments of `PagedModel.prefill`."""
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return start[:, None] + offset, offset >= length[:, None]

"""PagedModel: a decoder with its cache layout. One pass writes the tokens' keys and values and attends over pages."""

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
from pallas_kernels.tree import packed


class Branches(NamedTuple):
    """Tokens of a pass that are nodes of a tree. Their slots go by their places in the pass, as a chain's do.

    positions i32[B,T]: where they stand in their texts: as deep in the tree as they are.
    first i32[B]: the position of the slot of the tree's first node, which an earlier pass may have written.
    seen bool[B,T,_]: which nodes, counted from there, each of them sees: its ancestors and itself.
    """

    positions: jax.Array
    first: jax.Array
    seen: jax.Array


class Pass(NamedTuple):
    """What a pass gives.

    decoder: bound, whose `logits` the caller may ask for.
    hidden [B,T,E]: by the last norm.
    tapped: [B,T,E] each, what went into the layers asked for.
    slots i32[B*T]: where the tokens' keys and values were written.
    """

    decoder: Decoder
    hidden: jax.Array
    pages: tuple[LayerCache, ...]
    tapped: tuple[jax.Array, ...]
    slots: jax.Array


@dataclasses.dataclass(frozen=True)
class PagedModel:
    """Static description of a model over pages; max_model_len bounds the positions it may write."""

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
        """tokens, positions i32[B,T], masked bool[B,T] (written nowhere), block_table i32[B,N]; taps: as `Decoder`;
        branches: of tokens that are no chain.

        Rows whose tokens are all masked are not computed. A masked token may only stand after the unmasked ones of its
        row.
        """
        rows, decoder = self.rows(positions, masked, block_table, branches), bind(self.config, params)
        hidden, pages, tapped = decoder(tokens, pages, rows, self.backend, taps)
        return Pass(decoder, hidden, pages, tapped, rows.slots)

    def rows(
        self, positions: jax.Array, masked: jax.Array, block_table: jax.Array, branches: Branches | None = None
    ) -> Rows:
        """Where the tokens of a pass stand. Arguments as those of `forward`."""
        t, slots = positions.shape[1], self.slots(positions, masked, block_table)
        reach = lambda length: jnp.where(masked[:, 0], 0, positions[:, 0] + length)
        kv_len, num_keys = reach(t), reach(jnp.sum(~masked, axis=1, dtype=jnp.int32))
        if branches is None:
            return Rows(positions, slots, block_table, kv_len, num_keys)
        return Rows(branches.positions, slots, block_table, kv_len, num_keys, packed(*branches))

    def slots(self, positions: jax.Array, masked: jax.Array, block_table: jax.Array) -> jax.Array:
        """Of these positions [B,T]: i32[B*T], the pad slot where masked."""
        b, t = positions.shape
        return slot_mapping(
            positions.reshape(-1),
            masked.reshape(-1),
            jnp.arange(b + 1, dtype=jnp.int32) * (t - 1),  # the layout before the merge: rows one shorter
            block_table,
            page_size=self.layout.page_size,
            max_model_len=self.max_model_len,
            pad_slot=self.layout.pad_slot,
            **self.backend.how(),
        )

    def keep(self, cache: tuple[LayerCache, ...], kept: Kept) -> tuple[LayerCache, ...]:
        """Return the caches of all layers after a pass of which only some tokens stay."""
        return tuple(layer.keep(kept, self.backend) for layer in cache)

    def prefill(self, params, pages, tokens, start, length, block_table, *, taps: tuple[int, ...] = ()) -> Pass:
        """A prompt chunk: tokens i32[B,T] at positions start[b]..., of which length[b] are real. As `forward`."""
        return self.forward(params, pages, tokens, *places(tokens, start, length), block_table, taps)


def places(tokens: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(positions, masked) of a prompt chunk, its arguments as those of `PagedModel.prefill`."""
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return start[:, None] + offset, offset >= length[:, None]

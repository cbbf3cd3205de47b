"""PagedModel: a decoder with its cache layout. One pass writes the tokens' keys and values and attends over pages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import CacheLayout
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, Params, bind
from jaxspec.models.layers import Backend, Rows
from pallas_kernels.slot_mapping import slot_mapping


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
        pages: tuple[jax.Array, ...],
        tokens: jax.Array,
        positions: jax.Array,
        masked: jax.Array,
        block_table: jax.Array,
    ) -> tuple[Decoder, jax.Array, tuple[jax.Array, ...]]:
        """tokens, positions i32[B,T], masked bool[B,T] (written nowhere), block_table i32[B,N].

        -> (the bound decoder, whose `logits` the caller may ask for; hidden [B,T,E]; pages). Rows whose tokens are all
        masked are not computed. A masked token may only stand behind the unmasked ones of its row.
        """
        b, t = tokens.shape
        slots = slot_mapping(
            positions.reshape(-1),
            masked.reshape(-1),
            jnp.arange(b + 1, dtype=jnp.int32) * (t - 1),  # the layout before the merge: rows one shorter
            block_table,
            page_size=self.layout.page_size,
            max_model_len=self.max_model_len,
            pad_slot=self.layout.pad_slot,
            **self.backend.how(),
        )
        reach = lambda length: jnp.where(masked[:, 0], 0, positions[:, 0] + length)
        kv_len, num_keys = reach(t), reach(jnp.sum(~masked, axis=1, dtype=jnp.int32))
        decoder = bind(self.config, params)
        hidden, pages, _ = decoder(tokens, pages, Rows(positions, slots, block_table, kv_len, num_keys), self.backend)
        return decoder, hidden, pages

    def prefill(
        self, params, pages, tokens, start, length, block_table
    ) -> tuple[Decoder, jax.Array, tuple[jax.Array, ...]]:
        """A prompt chunk: tokens i32[B,T] at positions start[b]..., of which length[b] are real. As `forward`."""
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = start[:, None] + offset
        return self.forward(params, pages, tokens, positions, offset >= length[:, None], block_table)

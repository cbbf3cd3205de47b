"""PagedModel: a decoder with its cache layout. One pass writes the tokens' keys and values and attends over pages."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import CacheLayout
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, Params, bind
from jaxspec.models.layers import Backend, Rows
from pallas_kernels.slot_mapping import slot_mapping


class Pass(NamedTuple):
    """What a pass gives.

    decoder: bound, whose `logits` the caller may ask for.
    hidden [B,T,E]: by the last norm.
    tapped: [B,T,E] each, what went into the layers asked for.
    slots i32[B*T]: where the tokens' keys and values were written.
    """

    decoder: Decoder
    hidden: jax.Array
    pages: tuple[jax.Array, ...]
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
        pages: tuple[jax.Array, ...],
        tokens: jax.Array,
        positions: jax.Array,
        masked: jax.Array,
        block_table: jax.Array,
        taps: tuple[int, ...] = (),
    ) -> Pass:
        """tokens, positions i32[B,T], masked bool[B,T] (written nowhere), block_table i32[B,N]; taps: as `Decoder`.

        Rows whose tokens are all masked are not computed. A masked token may only stand after the unmasked ones of its
        row.
        """
        rows, decoder = self.rows(positions, masked, block_table), bind(self.config, params)
        hidden, pages, tapped = decoder(tokens, pages, rows, self.backend, taps)
        return Pass(decoder, hidden, pages, tapped, rows.slots)

    def rows(self, positions: jax.Array, masked: jax.Array, block_table: jax.Array) -> Rows:
        """Where the tokens of a pass stand. Arguments as those of `forward`."""
        b, t = positions.shape
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
        return Rows(positions, slots, block_table, kv_len, num_keys)

    def prefill(self, params, pages, tokens, start, length, block_table, *, taps: tuple[int, ...] = ()) -> Pass:
        """A prompt chunk: tokens i32[B,T] at positions start[b]..., of which length[b] are real. As `forward`."""
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = start[:, None] + offset
        return self.forward(params, pages, tokens, positions, offset >= length[:, None], block_table, taps)

"""Rows: the positions and cache slots of the tokens of one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """The positions and cache slots of the tokens of one pass. A pass without a KV cache has only positions.

    positions i32[B,T]: positions of the tokens in their texts.
    slots i32[B*T]: slots of the tokens' keys and values; the pad slot for tokens that are not written.
    block_table i32[B,N]: page ids.
    kv_len i32[B]: position of the row's first token + T, so that query t is at position kv_len - T + t. A row with
      kv_len 0 is not computed.
    num_keys i32[B]: number of positions of the row with keys: earlier ones and those of this pass, without padding.
    tree i32[B,T,_]: mask of the nodes that each token attends to if the tokens form a tree, packed in bits
      (`pallas_kernels.tree_mask`); else None.
    window_slots, window_table: slots and page ids in layers with a window, if these have a pool of their own.
    """

    positions: jax.Array
    slots: Any = None
    block_table: Any = None
    kv_len: Any = None
    num_keys: Any = None
    tree: Any = None
    window_slots: Any = None
    window_table: Any = None

    def of_layer(self, window: int | None) -> Rows:
        """Return the rows with the slots and page ids of a layer. window: the layer's window in tokens, or None."""
        if window is None or self.window_table is None:
            return self
        return dataclasses.replace(self, slots=self.window_slots, block_table=self.window_table)


def whole_rows(count: int, length: int) -> Rows:
    """Return the positions of `count` rows of `length` tokens that begin at position 0, for a pass without a cache."""
    return Rows(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length)))

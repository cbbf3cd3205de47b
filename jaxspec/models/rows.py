"""Rows: the positions of the tokens of one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """The positions of the tokens of one pass.

    positions i32[B,T]: of the tokens in their texts.
    slots i32[B*T]: of their keys and values; the pad slot where nothing is written.
    block_table i32[B,N]: page ids.
    kv_len i32[B]: position of the row's first token + T, so that attention places query t at kv_len - T + t.
    num_keys i32[B]: positions of the row that are written, padding of this pass left out. A row with kv_len 0 is not
      computed. A pass without a cache has positions only.
    tree i32[B,T,_]: which nodes each token sees, of tokens that are nodes of a tree (see `paged_attention`); else None.
    """

    positions: jax.Array
    slots: Any = None
    block_table: Any = None
    kv_len: Any = None
    num_keys: Any = None
    tree: Any = None


def whole_rows(count: int, length: int) -> Rows:
    """Return `count` rows of `length` tokens from position 0 on, without a cache."""
    return Rows(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length)))

"""Attention with queries only, over the keys and values in the cache of another model, such as a draft's target."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.mixers import attention
from jaxspec.models.rows import Rows


def declare(layer: Any, config: ModelConfig, own: LayerConfig, dtype: Any, entry: int | None) -> None:
    """Add the parameters of the queries to a Layer: those of a layer that shares another layer's keys and values."""
    attention.declare(layer, config, dataclasses.replace(own, shares=0), dtype, entry)


def mix(
    layer: Any,
    x: jax.Array,
    normed: jax.Array | None,
    memory: Any,
    read: Any,
    rows: Rows,
    ropes: attention.Tables,
    backend: Backend,
) -> tuple[jax.Array, Any]:
    """Attend with x [B,T,E]; return (mixed [B,T,H*D], memory).

    memory: cache of the other model's layer, and that model's backend, by whose placement the cache is sharded.
    """
    cache, owner = memory
    return attention.shared_attention(layer, x, normed, cache, rows, ropes, owner), memory

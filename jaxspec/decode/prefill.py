"""Prompt chunks into both caches. Never samples: the last prompt token stays pending for the first round."""

from __future__ import annotations

import dataclasses

import jax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.round import Params
from jaxspec.decode.state import DecodeConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Chunk:
    """tokens i32[B,T], of which length i32[B] are real (0: the row takes no part), at positions start i32[B]...;
    block_table i32[B,N]."""

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    block_table: jax.Array


def prefill(config: DecodeConfig, params: Params, cache: PagedKVCache, chunk: Chunk) -> PagedKVCache:
    """Writes the chunk's keys and values, the target's and the draft's."""
    arrays = (chunk.tokens, chunk.start, chunk.length, chunk.block_table)
    with jax.named_scope("prefill"):
        target = config.target.prefill(params["target"], cache.target, *arrays)
        draft = config.drafter.prefill(params.get("draft"), cache.draft, *arrays) if config.drafter else cache.draft
    return PagedKVCache(target, draft)

"""Tokens into the caches, chunk by chunk. Never samples: the last prompt token stays pending for the first round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.state import DecodeConfig, Params
from jaxspec.drafters.base import Chunk
from jaxspec.sampling.logprobs import Logprobs, logprobs

SLICE = 16  # tokens of a row whose logits are computed at a time


def prefill(
    config: DecodeConfig, params: Params, cache: PagedKVCache, chunk: Chunk
) -> tuple[PagedKVCache, Logprobs | None]:
    """Writes the chunk's keys and values, the target's and the draft's -> (caches, log-probabilities [B,T] of
    chunk.next_tokens, where there are any)."""
    with jax.named_scope("prefill"):
        decoder, hidden, target = config.target.prefill(params["target"], cache.target, *chunk.arrays)
        scores = None
        if chunk.next_tokens is not None:
            n = config.variant.logprobs or 0
            scores = by_slices(
                lambda h, t: logprobs(decoder.logits(h, config.target.backend), t, n), hidden, chunk.next_tokens
            )
    return PagedKVCache(target, draft_pages(config, params, cache, chunk)), scores


def catch_up(config: DecodeConfig, params: Params, cache: PagedKVCache, chunk: Chunk) -> tuple[PagedKVCache, None]:
    """Writes the draft's keys and values only, of rows that went on without it."""
    with jax.named_scope("catch_up"):
        return PagedKVCache(cache.target, draft_pages(config, params, cache, chunk)), None


def draft_pages(config: DecodeConfig, params: Params, cache: PagedKVCache, chunk: Chunk) -> Any:
    if config.drafter is None:
        return cache.draft
    return config.drafter.prefill(params.get("draft"), cache.draft, chunk)


def by_slices(function: Any, hidden: jax.Array, tokens: jax.Array) -> Logprobs:
    """function over slices of the second axis, one after the other: logits of a whole chunk would fill the memory."""
    rows, length = tokens.shape
    size = min(SLICE, length)  # both are powers of two
    cut = lambda x: jnp.moveaxis(x.reshape(rows, length // size, size, *x.shape[2:]), 1, 0)
    done = lax.map(lambda pair: function(*pair), (cut(hidden), cut(tokens)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:]), done)

"""Prefill: device programs that write the keys and values of prompts into the caches, chunk by chunk.

Prefill samples no tokens. A prompt's last token is left to the first round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import features
from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.state import DecodeConfig, ModelParams
from jaxspec.drafters.base import Chunk
from jaxspec.models.paged import Pass
from jaxspec.sampling.logprobs import Logprobs, logprobs

SLICE = 16  # largest number of tokens of each row whose logits are in memory at a time


def prefill(
    config: DecodeConfig, params: ModelParams, cache: PagedKVCache, chunk: Chunk
) -> tuple[PagedKVCache, Logprobs | None]:
    """Write the target's keys and values of a chunk of prompts, and the features of it that the draft reads.

    Return the caches, and the log-probabilities [B,T] of chunk.next_tokens, or None if the chunk has no next_tokens.
    """
    with jax.named_scope("prefill"):
        taps = config.reader.taps if config.reader else ()
        own, table = params["target"], chunk.window_table
        done = config.target.prefill(own, cache.target, *chunk.arrays, taps=taps, window_table=table)
        scores = None
        if chunk.next_tokens is not None:
            n = config.variant.logprobs or 0

            def score_slice(hidden: jax.Array, tokens: jax.Array) -> Logprobs:
                return logprobs(done.decoder.logits(hidden, config.target.backend), tokens, n)

            scores = by_slices(score_slice, done.hidden, chunk.next_tokens)
        cache = remember(config, params, cache, done)
    return cache, scores


def catch_up(config: DecodeConfig, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[PagedKVCache, None]:
    """Write the draft's keys and values of a chunk of prompts that the target has already read.

    Return the caches, and None, because this program has no other result.
    """
    assert config.drafter is not None
    with jax.named_scope("catch_up"):
        return dataclasses.replace(cache, draft=config.drafter.prefill(params, cache, chunk)), None


def remember(config: DecodeConfig, params: ModelParams, cache: PagedKVCache, done: Pass) -> PagedKVCache:
    """Return the caches with the results of a target pass: its pages, and features if a drafter reads them."""
    cache = dataclasses.replace(cache, target=done.pages)
    if config.reader is None:
        return cache
    kept = config.reader.features(params, done.hidden, done.tapped)
    return dataclasses.replace(cache, features=features.write(cache, done.slots, kept))


def by_slices(function: Any, hidden: jax.Array, tokens: jax.Array) -> Logprobs:
    """Apply a function of (hidden, tokens) to slices of the token axis, one after the other, and join the results.

    The function computes logits. The logits of a whole chunk at once would fill the memory.
    """
    rows, length = tokens.shape
    size = min(SLICE, length)  # both are powers of two, so `size` divides `length`

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(rows, length // size, size, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:])

    done = lax.map(lambda pair: function(*pair), (split(hidden), split(tokens)))
    result: Logprobs = jax.tree.map(join, done)
    return result

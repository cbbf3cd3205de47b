"""Prefill: write prompts into the caches, chunk by chunk.

Nothing is sampled here. The last prompt token stays pending for the first round.
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

SLICE = 16  # tokens of a row whose logits are computed at a time


def prefill(
    config: DecodeConfig, params: ModelParams, cache: PagedKVCache, chunk: Chunk
) -> tuple[PagedKVCache, Logprobs | None]:
    """Write the target's keys and values of a chunk, and the features that the draft reads.

    Return the caches, and the log-probabilities [B,T] of chunk.next_tokens where these are given.
    """
    with jax.named_scope("prefill"):
        taps = config.reader.taps if config.reader else ()
        done = config.target.prefill(params["target"], cache.target, *chunk.arrays, taps=taps)
        scores = None
        if chunk.next_tokens is not None:
            n = config.variant.logprobs or 0

            def score_slice(hidden, tokens):
                return logprobs(done.decoder.logits(hidden, config.target.backend), tokens, n)

            scores = by_slices(score_slice, done.hidden, chunk.next_tokens)
        cache = remember(config, params, cache, done)
    return cache, scores


def catch_up(config: DecodeConfig, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[PagedKVCache, None]:
    """Write the draft's keys and values of a chunk that the target has already processed."""
    assert config.drafter is not None
    with jax.named_scope("catch_up"):
        return dataclasses.replace(cache, draft=config.drafter.prefill(params, cache, chunk)), None


def remember(config: DecodeConfig, params: ModelParams, cache: PagedKVCache, done: Pass) -> PagedKVCache:
    """Return the caches with the target's pages after a pass, and with the drafter's features of its tokens."""
    cache = dataclasses.replace(cache, target=done.pages)
    if config.reader is None:
        return cache
    kept = config.reader.features(params, done.hidden, done.tapped)
    return dataclasses.replace(cache, features=features.write(cache, done.slots, kept))


def by_slices(function: Any, hidden: jax.Array, tokens: jax.Array) -> Logprobs:
    """Apply a function to slices of the second axis, one after the other, and join the results.

    The logits of a whole chunk at once would fill the memory.
    """
    rows, length = tokens.shape
    size = min(SLICE, length)  # both are powers of two

    def split(x):
        return jnp.moveaxis(x.reshape(rows, length // size, size, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:])

    done = lax.map(lambda pair: function(*pair), (split(hidden), split(tokens)))
    return jax.tree.map(join, done)

"""Prompt lookup: propose the tokens that followed an earlier occurrence of the row's last tokens.

Source: https://github.com/apoorvumang/prompt-lookup-decoding (also `prompt_lookup_num_tokens` in transformers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Int
from jaxspec.drafters.base import Choose, Drafter, History, ModelParams, Proposal
from jaxspec.models.paged import PagedModel


@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """A drafter that looks up n-grams in the row's own tokens (prompt lookup).

    The drafter takes the largest n in [lookup_min, lookup_max] for which the row's last n tokens occurred before. The
    proposal is the tokens that followed the earliest occurrence of these n tokens.
    """

    lookup_min: int = 2
    lookup_max: int = 4

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        tokens, num_positions = history.tokens, history.tokens.shape[1]
        match = agreement(tokens, history.num_tokens, self.lookup_max)
        best = jnp.max(match, axis=1, keepdims=True)
        found = best[:, 0] >= self.lookup_min
        end = jnp.argmax(match == best, axis=1)  # last position of the longest match's earliest occurrence
        follow = end[:, None] + 1 + jnp.arange(self.num_speculative_tokens)[None, :]
        proposed = jnp.take_along_axis(tokens, jnp.minimum(follow, num_positions - 1), axis=1)
        available = jnp.where(found & history.live, history.num_tokens - 1 - end, 0)
        num_proposed = jnp.minimum(available, history.num_wanted).astype(jnp.int32)
        return Proposal(proposed, None, num_proposed), cache.draft


def agreement(tokens: Int[Array, "B L"], num_tokens: Int[Array, " B"], most: int) -> Int[Array, "B L"]:
    """Return for each position the length of the longest match that ends there.

    A match is a run of tokens equal to the last tokens of the row. The length is at most `most`. It is 0 at the row's
    last token, which would match itself.
    """
    length = num_tokens[:, None]
    num_positions = tokens.shape[1]
    position = jnp.arange(num_positions)[None, :]
    match = jnp.zeros(tokens.shape, jnp.int32)
    unbroken = position < length - 1
    for n in range(most):
        suffix = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - n, 0), axis=1)
        shifted = jnp.pad(tokens, ((0, 0), (n, 0)))[:, :num_positions]
        unbroken &= (shifted == suffix) & (position >= n) & (length > n)
        match += unbroken
    return match


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> NGram:
    """Return the drafter by prompt lookup. The arguments are those in `jaxspec.drafters.methods`."""
    return NGram(k, *speculative.lookup)

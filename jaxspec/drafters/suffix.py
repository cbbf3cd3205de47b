"""Suffix decoding: propose the tokens that most often followed the row's last tokens, while they are likely enough.

A match is an earlier occurrence of the row's last tokens. Prompt lookup continues from one occurrence of the longest
match. Suffix decoding counts which tokens followed up to 32 earlier occurrences, for every match length. It proposes
the run of tokens from which the most are expected to be accepted. It counts in the row's own prompt and output only,
not in other requests. Source: Oliaro et al., https://arxiv.org/abs/2411.04975.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.drafters.base import Choose, Drafter, History, ModelParams, Proposal
from jaxspec.drafters.ngram import agreement
from jaxspec.models.paged import PagedModel


@dataclasses.dataclass(frozen=True)
class Suffix(Drafter):
    """A drafter by suffix decoding.

    A match is an earlier occurrence of the row's last tokens. A run is the tokens proposed after a match.

    depth: maximum length of a match and its run together, in tokens.
    factor: maximum length of a run, as a multiple of its match's length.
    min_prob: estimated probability of a run's prefix below which the run ends.
    most: maximum number of earlier occurrences that are counted: longer matches first, then later positions.
    """

    depth: int = 24
    factor: float = 1.0
    min_prob: float = 0.1
    most: int = 32

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        tokens = history.tokens
        count = min(self.num_speculative_tokens, self.depth - 1)
        match = agreement(tokens, history.num_tokens, self.depth - 1)
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        _, ends = lax.top_k(match * tokens.shape[1] + place, min(self.most, tokens.shape[1]))  # [B,C]
        follow = ends[:, :, None] + 1 + jnp.arange(count, dtype=jnp.int32)
        after = jnp.take_along_axis(tokens[:, None, :], follow, axis=2, mode="clip")  # [B,C,K]
        known = follow < history.num_tokens[:, None, None]

        lengths = jnp.arange(1, self.depth, dtype=jnp.int32)  # the P possible lengths of a match
        counted = jnp.take_along_axis(match, ends, axis=1)[:, None, :] >= lengths[:, None]  # [B,P,C]
        runs, probs = frequent_runs(after, known, counted)
        longest = jnp.minimum((lengths * self.factor + 1e-6).astype(jnp.int32), self.depth - lengths)
        kept = (probs > 0) & (probs >= self.min_prob) & (jnp.arange(count) < longest[:, None])
        # A run is limited to the row's own K, so that the row's choice does not depend on the other rows' K.
        kept &= (jnp.arange(count) < history.num_wanted[:, None])[:, None]
        expected = jnp.sum(jnp.where(kept, probs, 0.0), axis=2)  # expected number of accepted tokens, [B,P]
        best = expected.shape[1] - 1 - jnp.argmax(expected[:, ::-1], axis=1)  # ties go to the longest match

        def pick(x: Array) -> Array:
            return jnp.take_along_axis(x, best[:, None, None], axis=1)[:, 0]

        length = jnp.sum(pick(kept), axis=1, dtype=jnp.int32)
        num_proposed = jnp.where(history.live, jnp.minimum(length, history.num_wanted), 0)
        drafts = jnp.pad(pick(runs), ((0, 0), (0, self.num_speculative_tokens - count)))
        return Proposal(drafts, None, num_proposed), cache.draft


def frequent_runs(
    after: Int[Array, "B _ K"], known: Bool[Array, "B _ K"], counted: Bool[Array, "B P _"]
) -> tuple[Int[Array, "B P K"], Float[Array, "B P K"]]:
    """Return the most frequent run of K tokens after the counted occurrences, for each match length.

    An occurrence is an earlier position at which the row's last tokens end. Each token of a run is the most frequent
    next token among the occurrences that continue with the run so far. Ties go to the token of the occurrence that
    comes first in `after`. The second result is the estimated probability of the run up to each token: the product of
    these tokens' relative frequencies. It is 0 where no committed token follows.

    after: the K tokens after each of C occurrences.
    known: whether these tokens are committed.
    counted: whether an occurrence counts for each of the P match lengths.
    """
    run_prob = jnp.ones(counted.shape[:2], jnp.float32)
    runs, probs = [], []
    for i in range(after.shape[2]):
        counted &= known[:, None, :, i]
        same = after[:, :, None, i] == after[:, None, :, i]
        votes = jnp.sum(same[:, None] & counted[:, :, None, :], axis=3, dtype=jnp.int32) * counted
        total = jnp.sum(counted, axis=2, dtype=jnp.int32)
        winner = jnp.argmax(votes, axis=2)
        token = jnp.take_along_axis(after[:, :, i], winner, axis=1)
        run_prob = run_prob * jnp.max(votes, axis=2) / jnp.maximum(total, 1)
        counted &= after[:, None, :, i] == token[:, :, None]
        runs.append(token)
        probs.append(run_prob)
    return jnp.stack(runs, axis=2), jnp.stack(probs, axis=2)


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> Suffix:
    """Return the drafter by suffix decoding. The arguments are those in `jaxspec.drafters.methods`."""
    return Suffix(
        k,
        speculative.suffix_decoding_max_tree_depth,
        speculative.suffix_decoding_max_spec_factor,
        speculative.suffix_decoding_min_token_prob,
    )

"""Suffix decoding: what most often followed the row's last tokens before, for as long as that is likely enough.

Where prompt lookup goes on from one earlier occurrence of the longest match, this counts what followed all of them, for
every length of the match, and takes the run of which the most tokens are expected to be right. Its counts are of the
row's own prompt and output: other requests' are not kept. Source: Oliaro et al., https://arxiv.org/abs/2411.04975.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.drafters.base import Choose, Drafter, History, Proposal
from jaxspec.drafters.ngram import agreement
from jaxspec.models.paged import PagedModel


@dataclasses.dataclass(frozen=True)
class Suffix(Drafter):
    """depth: most tokens of a match and of the run after it together. factor: of its match's length, how long a run may
    be. min_prob: a run ends where it is less likely than this. most: earlier occurrences that are counted, first those
    of the longest match, then the latest."""

    depth: int = 24
    factor: float = 1.0
    min_prob: float = 0.1
    most: int = 32

    def propose(self, params, cache, history: History, choose: Choose):
        tokens, count = history.tokens, min(self.num_speculative_tokens, self.depth - 1)
        match = agreement(tokens, history.num_tokens, self.depth - 1)
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        _, ends = lax.top_k(match * tokens.shape[1] + place, min(self.most, tokens.shape[1]))  # [B,C]
        follow = ends[:, :, None] + 1 + jnp.arange(count, dtype=jnp.int32)
        after = jnp.take_along_axis(tokens[:, None, :], follow, axis=2, mode="clip")  # [B,C,K]
        known = follow < history.num_tokens[:, None, None]

        lengths = jnp.arange(1, self.depth, dtype=jnp.int32)  # P, of matches
        counted = jnp.take_along_axis(match, ends, axis=1)[:, None, :] >= lengths[:, None]  # [B,P,C]
        runs, probs = frequent_runs(after, known, counted)
        longest = jnp.minimum((lengths * self.factor + 1e-6).astype(jnp.int32), self.depth - lengths)
        kept = (probs > 0) & (probs >= self.min_prob) & (jnp.arange(count) < longest[:, None])
        # Those that the row wants: which run is chosen is not to hang on what its neighbours want.
        kept &= (jnp.arange(count) < history.num_wanted[:, None])[:, None]
        expected = jnp.sum(jnp.where(kept, probs, 0.0), axis=2)  # tokens that are right, [B,P]
        best = expected.shape[1] - 1 - jnp.argmax(expected[:, ::-1], axis=1)  # of equals the longest match
        pick = lambda x: jnp.take_along_axis(x, best[:, None, None], axis=1)[:, 0]
        length = jnp.sum(pick(kept), axis=1, dtype=jnp.int32)
        num_proposed = jnp.where(history.live, jnp.minimum(length, history.num_wanted), 0)
        drafts = jnp.pad(pick(runs), ((0, 0), (0, self.num_speculative_tokens - count)))
        return Proposal(drafts, None, num_proposed), cache.draft


def frequent_runs(
    after: Int[Array, "B _ K"], known: Bool[Array, "B _ K"], counted: Bool[Array, "B P _"]
) -> tuple[Int[Array, "B P K"], Float[Array, "B P K"]]:
    """The most frequent token after the occurrences that are counted, then after those of them that it followed, and so
    on -> (tokens, how likely each is together with all before it; 0 from where nothing is known). Of tokens that are
    as frequent the one of the first occurrence counts."""
    sure, runs, probs = jnp.ones(counted.shape[:2], jnp.float32), [], []
    for i in range(after.shape[2]):
        counted &= known[:, None, :, i]
        same = after[:, :, None, i] == after[:, None, :, i]
        votes = jnp.sum(same[:, None] & counted[:, :, None, :], axis=3, dtype=jnp.int32) * counted
        total, winner = jnp.sum(counted, axis=2, dtype=jnp.int32), jnp.argmax(votes, axis=2)
        token = jnp.take_along_axis(after[:, :, i], winner, axis=1)
        sure = sure * jnp.max(votes, axis=2) / jnp.maximum(total, 1)
        counted &= after[:, None, :, i] == token[:, :, None]
        runs.append(token)
        probs.append(sure)
    return jnp.stack(runs, axis=2), jnp.stack(probs, axis=2)


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> Suffix:
    return Suffix(
        k,
        speculative.suffix_decoding_max_tree_depth,
        speculative.suffix_decoding_max_spec_factor,
        speculative.suffix_decoding_min_token_prob,
    )

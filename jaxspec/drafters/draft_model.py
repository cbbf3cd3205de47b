"""A second, smaller model that proposes K tokens autoregressively on its own pages.

Source: Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxspec.drafters.base import Choose, History, Proposal
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row
from jaxspec.shapes import Array, Bool, Int
from pallas_kernels.merge_tokens import merge_tokens


@dataclasses.dataclass(frozen=True)
class DraftModel:
    num_speculative_tokens: int
    model: PagedModel

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    def propose(self, params, pages, history: History, choose: Choose) -> tuple[Proposal, Any]:
        last, missing = self.first_pass_tokens(history)
        tokens, positions, masked = last
        masked |= ~history.live[:, None]
        proposed: list[Any] = []
        probs: list[Any] = []
        for i in range(self.num_speculative_tokens):
            decoder, hidden, pages = self.model.forward(params, pages, tokens, positions, masked, history.block_table)
            newest = take_row(hidden, missing) if i == 0 else hidden[:, 0]
            token, p = choose(decoder, newest, proposed)
            proposed.append(token)
            probs.append(p)
            tokens, positions = token[:, None], (history.num_tokens + i)[:, None]
            masked = (~history.live | (history.num_wanted <= i + 1))[:, None]
        num_proposed = jnp.where(history.live, history.num_wanted, 0)
        stacked = None if probs[0] is None else jnp.stack(probs, axis=1)
        return Proposal(jnp.stack(proposed, axis=1), stacked, num_proposed), pages

    def first_pass_tokens(
        self, history: History
    ) -> tuple[tuple[Int[Array, "B 2"], Int[Array, "B 2"], Bool[Array, "B 2"]], Int[Array, " B"]]:
        """((tokens, positions, masked), index of the pending token).

        After a round of full acceptance the draft cache lacks the last accepted token. So the first pass is always two
        wide: that token, rejected where the cache has it already, merged with the pending one.
        """
        rows = history.num_tokens.shape[0]
        query_start = jnp.arange(rows + 1, dtype=jnp.int32)
        has_it = (history.draft_len == history.num_tokens - 1).astype(jnp.int32)
        at = lambda back: take_row(history.tokens, jnp.maximum(history.num_tokens - back, 0))
        how: dict[str, Any] = self.model.backend.how
        tokens, rejected = merge_tokens(at(2), at(1), query_start, has_it, **how)
        before = jnp.maximum(history.num_tokens - 2, 0)
        positions, _ = merge_tokens(before, history.num_tokens - 1, query_start, has_it, **how)
        pairs = tokens.reshape(rows, 2), positions.reshape(rows, 2), rejected.reshape(rows, 2)
        return pairs, 1 - has_it

    def prefill(
        self,
        params,
        pages,
        tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        length: Int[Array, " B"],
        block_table: Int[Array, "B N"],
    ):
        return self.model.prefill(params, pages, tokens, start, length, block_table)[2]

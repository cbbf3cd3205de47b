"""A second, smaller model that proposes K tokens autoregressively on its own pages.

Source: Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import Choose, Chunk, History, Proposal
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
        count = self.num_speculative_tokens
        (tokens, positions, masked), missing = self.first_pass_tokens(history)
        masked |= ~history.live[:, None]
        decoder, hidden, pages = self.model.forward(params, pages, tokens, positions, masked, history.block_table)
        drafts = jnp.zeros((tokens.shape[0], count), jnp.int32)
        first = choose(decoder, take_row(hidden, missing), drafts, 0)
        room = jax.tree.map(lambda x: jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype), first)
        put = lambda i, drawn, chosen: jax.tree.map(
            lambda x, one: lax.dynamic_update_index_in_dim(x, one, i, axis=1), drawn, chosen
        )

        def one_more(i, carry):
            pages, drawn = carry
            token = lax.dynamic_index_in_dim(drawn[0], i - 1, axis=1)
            positions = (history.num_tokens + i - 1)[:, None]
            masked = (~history.live | (history.num_wanted <= i))[:, None]
            decoder, hidden, pages = self.model.forward(params, pages, token, positions, masked, history.block_table)
            return pages, put(i, drawn, choose(decoder, hidden[:, 0], drawn[0], i))

        # A loop, so that all but the first are compiled once.
        pages, (drafts, probs) = lax.fori_loop(1, count, one_more, (pages, put(0, room, first)))
        return Proposal(drafts, probs, jnp.where(history.live, history.num_wanted, 0)), pages

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
        how: dict[str, Any] = self.model.backend.how()
        tokens, rejected = merge_tokens(at(2), at(1), query_start, has_it, **how)
        before = jnp.maximum(history.num_tokens - 2, 0)
        positions, _ = merge_tokens(before, history.num_tokens - 1, query_start, has_it, **how)
        pairs = tokens.reshape(rows, 2), positions.reshape(rows, 2), rejected.reshape(rows, 2)
        return pairs, 1 - has_it

    def prefill(self, params, pages, chunk: Chunk):
        return self.model.prefill(params, pages, *chunk.arrays)[2]

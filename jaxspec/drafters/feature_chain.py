"""Drafts by a head that reads the target's hidden states: what EAGLE and its kin have in common.

An entry of the head's cache is made of the target's features at position p and the token at p + 1, and stands at slot
p; what leaves it predicts the token at p + 2. The first pass of a round makes the entries up to the pending token's
from what the target has said; the ones after it go on from the head's own output, in its place. These are made anew by
the next round's first pass, once the target has said more: it is K + 1 entries wide.

Source: Li et al., https://arxiv.org/abs/2401.15077.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import features
from jaxspec.drafters.base import Choose, Chunk, Drafter, History, Proposal, Rank, lender
from jaxspec.drafters.chain import Step, at_once, chain
from jaxspec.drafters.trees.tree import Nodes, Shape, grown, nodes_at
from jaxspec.models.decoder import bind
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row


@dataclasses.dataclass(frozen=True)
class FeatureChain(Drafter):
    """most: the largest K of the engine, by which its cache may lag. model: the head, whose module gives

    features(hidden, tapped, backend) -> [B,T,M], what is kept of positions;
    __call__(x [B,T,E], feature [B,T,M], pages, rows, backend), x being the tokens as a table has them -> (what logits
      are made of, what the next entry takes for its features, pages);
    embedded and logits, as Decoder's, where it has a table (has_table) and a head (has_head) of its own.
    """

    most: int
    model: PagedModel
    target: PagedModel
    lookahead: int = 1

    @property
    def max_lag(self) -> int:
        return self.most + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return draft_spec(self.model.config).taps

    @property
    def features_width(self) -> int:
        return draft_spec(self.model.config).features_width

    def features(self, params, hidden, tapped):
        return bind(self.model.config, params["draft"]).features(hidden, tapped, self.model.backend)

    def propose(self, params, cache, history: History, choose: Choose):
        first, last, in_step = self.first_pass(params, cache, history)

        def step(state, token, i) -> Step:
            pages, carried = state
            masked = (~history.live | (history.num_wanted <= i))[:, None]
            where = (last + i)[:, None], masked, history.block_table
            hidden, carried, pages = self.entries(params, pages, token[:, None], carried[:, None], *where)
            return Step(self.speaker(params), hidden[:, 0], (pages, carried[:, 0]))

        drafts, probs, (pages, _) = chain(self.num_speculative_tokens, first, step, choose)
        return self.proposal(history, drafts, probs, last, in_step), pages

    def grow(self, params, cache, history: History, shape: Shape, rank: Rank):
        first, last, in_step = self.first_pass(params, cache, history)

        def step(state, nodes: Nodes, level) -> Step:
            pages, carried = state
            carried = jnp.take_along_axis(carried, nodes.after[:, :, None], axis=1)
            where = nodes_at(last + 1, level, nodes, last + level, history)
            hidden, carried, pages = self.entries(params, pages, nodes.tokens, carried, *where)
            return Step(self.speaker(params), hidden, (pages, carried))

        pages, carried = first.state
        carried = jnp.repeat(carried[:, None], shape.width, axis=1)  # of all that come after the pending token
        kept, (pages, _) = grown(shape, Step(first.head, first.hidden, (pages, carried)), step, rank)
        return self.proposal(history, kept[0], None, last, in_step), kept, pages

    def first_pass(self, params, cache, history: History) -> tuple[Step, jax.Array, jax.Array]:
        """(the pass over the entries that the cache lacks, up to the pending token's; the last two of `first`)."""
        table = history.block_table
        last, start, in_step = self.first(history)
        positions = start[:, None] + jnp.arange(self.most + 1, dtype=jnp.int32)
        masked = (positions > last[:, None]) | ~history.live[:, None]
        tokens = jnp.take_along_axis(history.tokens, positions + 1, axis=1, mode="clip")
        known = features.read(cache, positions, table, self.model.backend.placement)
        hidden, carried, pages = self.entries(params, cache.draft, tokens, known, positions, masked, table)
        at = jnp.maximum(last, 0) - start
        return Step(self.speaker(params), take_row(hidden, at), (pages, take_row(carried, at))), last, in_step

    def speaker(self, params) -> Any:
        """What has the logits. Within a loop it is bound anew: matrices that lie output-first are turned there, which
        costs nothing, where one that came in turned would be laid out anew in every pass."""
        head: Any = bind(self.model.config, params["draft"])
        return head if head.has_head else bind(self.target.config, lender(params))

    def first(self, history: History) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(position of the entry whose token is the pending one, of the first that the cache lacks, whether the first
        pass reaches that), i32[B], i32[B], bool[B]."""
        last = history.num_tokens - 2
        start = jnp.clip(history.draft_len, jnp.maximum(last - self.most, 0), jnp.maximum(last, 0))
        return last, start, history.draft_len >= history.num_tokens - 1 - self.max_lag

    def proposal(self, history: History, drafts, probs, last, in_step) -> Proposal:
        """Of a prompt of one token the target has said nothing yet; a cache too far behind has to catch up first."""
        wanted = jnp.where(history.live & in_step & (last >= 0), history.num_wanted, 0)
        return Proposal(drafts, probs, wanted, jnp.where(in_step, history.num_tokens - 1, history.draft_len))

    def prefill(self, params, cache, chunk: Chunk):
        """The entries that end with the chunk's tokens: the first of a prompt ends none."""
        first = (chunk.start == 0).astype(jnp.int32)
        tokens = jnp.where(first[:, None] == 1, jnp.roll(chunk.tokens, -1, axis=1), chunk.tokens)
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = (chunk.start - 1 + first)[:, None] + offset
        masked = offset >= (chunk.length - first)[:, None]
        known = features.read(cache, positions, chunk.block_table, self.model.backend.placement)
        return self.entries(params, cache.draft, tokens, known, positions, masked, chunk.block_table)[2]

    def entries(self, params, pages, tokens, feature, positions, masked, table, branches=None):
        """tokens i32[B,T] with the features [B,T,M] of the positions before them."""
        target, backend = bind(self.target.config, lender(params)), self.model.backend
        head: Any = bind(self.model.config, params["draft"])
        # What nobody reads is no less a number than what is.
        feature = jnp.where(masked[:, :, None], jnp.zeros_like(feature), feature)
        x = (head if head.has_table else target).embedded(tokens, backend)
        return head(x, feature, pages, self.model.rows(positions, masked, table, branches), backend)


@dataclasses.dataclass(frozen=True)
class FeatureBlock(FeatureChain):
    """All K in one pass: after the entries that the cache lacks, K - 1 of a mask with features of its own (P-EAGLE).

    Source: https://docs.vllm.ai/projects/speculators/en/latest/user_guide/algorithms/peagle/
    """

    @property
    def independent(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return 1

    def propose(self, params, cache, history: History, choose: Choose):
        count, table, backend = self.num_speculative_tokens, history.block_table, self.model.backend
        head: Any = bind(self.model.config, params["draft"])
        mask: Any = self.model.config.mask_id
        last, start, in_step = self.first(history)
        positions = start[:, None] + jnp.arange(self.most + count, dtype=jnp.int32)
        real = positions <= last[:, None]
        known = jnp.take_along_axis(history.tokens, positions + 1, axis=1, mode="clip")
        tokens = jnp.where(real, known, mask)
        kept = features.read(cache, positions, table, backend.placement)
        feature = jnp.where(real[:, :, None], kept, head.masks(backend).astype(kept.dtype))
        end = last + jnp.maximum(history.num_wanted, 1) - 1
        masked = (positions > end[:, None]) | (~history.live | (last < 0))[:, None]
        hidden, _, pages = self.entries(params, cache.draft, tokens, feature, positions, masked, table)
        at = (jnp.maximum(last, 0) - start)[:, None] + jnp.arange(count)
        hidden = jnp.take_along_axis(hidden, jnp.minimum(at, positions.shape[1] - 1)[:, :, None], axis=1)
        drafts, probs = at_once(self.speaker(params), hidden, choose)
        return self.proposal(history, drafts, probs, last, in_step), pages

"""Drafters that use a head (a small network) over the target's hidden states, as EAGLE and related methods do.

Features are vectors computed from the target's hidden states, one per position. Entry p of the head's KV cache is
computed from the features at position p and the token at p + 1. The head's output there predicts the token at p + 2.
The first pass of a round uses the target's features. It ends at the entry of the pending token (accepted, not yet read
by the target). Later passes of the round use the head's own output as features, because the target has not computed
them yet. The next round's first pass, K + 1 entries wide, recomputes these entries from the target's features.

Source: Li et al., https://arxiv.org/abs/2401.15077.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import features
from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.drafters.base import Choose, Chunk, Drafter, History, ModelParams, Proposal, Rank, target_parameters
from jaxspec.drafters.chain import Step, at_once, chain
from jaxspec.drafters.trees.growth import Grown, Nodes, Shape, grow_tree, nodes_at
from jaxspec.models.decoder import bind
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import Branches, PagedModel
from jaxspec.sampling.rng import take_row


@dataclasses.dataclass(frozen=True)
class FeatureChain(Drafter):
    """A drafter that runs a head once for each draft: first on the target's features, then on the head's own output.

    most: the engine's largest K, or the depth of its draft trees; a round's first pass can compute that many missing
      entries of the head's KV cache, and the pending token's entry.
    model: the drafting head.
    target: the model that the head drafts for.
    lookahead: 1, since a cache entry also depends on the token after its position.

    The head's nnx module has these methods:
      features(hidden, tapped, backend): returns the features [B,T,M] to cache.
      __call__(x, feature, pages, rows, backend): runs one pass over embeddings x [B,T,E] and features [B,T,M]. Returns
        the hidden states from which logits are computed, the features of the next entries, and the cache pages.
      embedded, logits: as `Decoder`'s, if the head has its own embedding table (has_table) or output head (has_head).
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

    def features(
        self, params: ModelParams, hidden: Float[Array, "B T E"], tapped: Sequence[Float[Array, "B T E"]]
    ) -> Float[Array, "B T M"]:
        result: Float[Array, "B T M"] = bind(self.model.config, params["draft"]).features(
            hidden, tapped, self.model.backend
        )
        return result

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        first, last, in_step = self.first_pass(params, cache, history)

        def step(state: Any, token: Int[Array, " B"], i: Any) -> Step:
            pages, carried = state
            masked = (~history.live | (history.num_wanted <= i))[:, None]
            where = (last + i)[:, None], masked, history.block_table
            hidden, carried, pages = self.entries(params, pages, token[:, None], carried[:, None], *where)
            return Step(self.logits_head(params), hidden[:, 0], (pages, carried[:, 0]))

        drafts, probs, (pages, _) = chain(self.num_speculative_tokens, first, step, choose)
        return self.proposal(history, drafts, probs, last, in_step), pages

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Shape, rank: Rank
    ) -> tuple[Proposal, Grown, tuple[LayerCache, ...]]:
        first, last, in_step = self.first_pass(params, cache, history)

        def step(state: Any, nodes: Nodes, level: Any) -> Step:
            pages, carried = state
            carried = jnp.take_along_axis(carried, nodes.after[:, :, None], axis=1)
            where = nodes_at(last + 1, level, nodes, last + level, history)
            hidden, carried, pages = self.entries(params, pages, nodes.tokens, carried, *where)
            return Step(self.logits_head(params), hidden, (pages, carried))

        pages, carried = first.state
        carried = jnp.repeat(carried[:, None], shape.width, axis=1)  # features, the same for all first-level nodes
        grown, (pages, _) = grow_tree(shape, Step(first.head, first.hidden, (pages, carried)), step, rank)
        return self.proposal(history, grown.tokens, None, last, in_step), grown, pages

    def first_pass(
        self, params: ModelParams, cache: PagedKVCache, history: History
    ) -> tuple[Step, jax.Array, jax.Array]:
        """Run a round's first pass, over the entries that the head's KV cache lacks.

        Return the output of the pass at its last entry, and the results `last` and `in_step` of the method `first`.
        """
        table = history.block_table
        last, start, in_step = self.first(history)
        positions = start[:, None] + jnp.arange(self.most + 1, dtype=jnp.int32)
        masked = (positions > last[:, None]) | ~history.live[:, None]
        tokens = jnp.take_along_axis(history.tokens, positions + 1, axis=1, mode="clip")
        known = features.read(cache, positions, table, self.model.backend.placement)
        hidden, carried, pages = self.entries(params, cache.draft, tokens, known, positions, masked, table)
        at = jnp.maximum(last, 0) - start
        return Step(self.logits_head(params), take_row(hidden, at), (pages, take_row(carried, at))), last, in_step

    def logits_head(self, params: ModelParams) -> Any:
        """Return the model that computes the logits, bound to its parameters.

        This is the drafting head, or the target if the drafting head has no output head of its own.

        A loop's body must call this method itself. Matrices that are stored output-first are then transposed inside the
        loop, for free. A matrix that was transposed outside the loop would get a new layout in every pass.
        """
        head: Any = bind(self.model.config, params["draft"])
        return head if head.has_head else bind(self.target.config, target_parameters(params))

    def first(self, history: History) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Locate the cache entries that a round's first pass computes.

        Return three arrays:
          last i32[B]: position of the entry whose token is the pending one (accepted, not yet read by the target).
          start i32[B]: position of the first entry of the pass.
          in_step bool[B]: whether the pass covers all entries that the head's KV cache lacks.
        """
        last = history.num_tokens - 2
        start = jnp.clip(history.draft_len, jnp.maximum(last - self.most, 0), jnp.maximum(last, 0))
        return last, start, history.draft_len >= history.num_tokens - 1 - self.max_lag

    def proposal(
        self,
        history: History,
        drafts: Int[Array, "B K"],
        probs: Any,
        last: Int[Array, " B"],
        in_step: Bool[Array, " B"],
    ) -> Proposal:
        """Return the proposal of these drafts.

        A row proposes no drafts if its cache trails too far (`in_step` is False). It also proposes none after a prompt
        of one token, for which the target has no features yet (`last` is below 0).
        """
        wanted = jnp.where(history.live & in_step & (last >= 0), history.num_wanted, 0)
        return Proposal(drafts, probs, wanted, jnp.where(in_step, history.num_tokens - 1, history.draft_len))

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        """Write the cache entries of a chunk's tokens, and return the pages.

        A token's entry is computed from the token and the features before it, so a prompt's first token has none.
        """
        first = (chunk.start == 0).astype(jnp.int32)
        tokens = jnp.where(first[:, None] == 1, jnp.roll(chunk.tokens, -1, axis=1), chunk.tokens)
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = (chunk.start - 1 + first)[:, None] + offset
        masked = offset >= (chunk.length - first)[:, None]
        known = features.read(cache, positions, chunk.block_table, self.model.backend.placement)
        return self.entries(params, cache.draft, tokens, known, positions, masked, chunk.block_table)[2]

    def entries(
        self,
        params: ModelParams,
        pages: tuple[LayerCache, ...],
        tokens: Int[Array, "B T"],
        feature: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        masked: Bool[Array, "B T"],
        table: Int[Array, "B N"],
        branches: Branches | None = None,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T M"], tuple[LayerCache, ...]]:
        """Run the drafting head over tokens i32[B,T] and the features [B,T,M] of the positions before these tokens.

        Return the hidden states, the next features, and the cache pages, as the head does.
        """
        target = bind(self.target.config, target_parameters(params))
        backend = self.model.backend
        head: Any = bind(self.model.config, params["draft"])
        # The outputs of masked tokens are never read. Zero features keep garbage in the pages from making them NaN.
        feature = jnp.where(masked[:, :, None], jnp.zeros_like(feature), feature)
        x = (head if head.has_table else target).embedded(tokens, backend)
        result: tuple[Float[Array, "B T E"], Float[Array, "B T M"], tuple[LayerCache, ...]] = head(
            x, feature, pages, self.model.rows(positions, masked, table, branches), backend
        )
        return result


@dataclasses.dataclass(frozen=True)
class FeatureBlock(FeatureChain):
    """A drafter whose head drafts all K tokens in one pass (P-EAGLE).

    The pass computes the entries that the head's KV cache lacks, and K - 1 entries of a mask token, whose features are
    learned. The head's nnx module also has a method masks(backend), which returns these features [M].
    Source: https://docs.vllm.ai/projects/speculators/en/latest/user_guide/algorithms/peagle/
    """

    @property
    def independent(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return 1

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
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
        drafts, probs = at_once(self.logits_head(params), hidden, choose)
        return self.proposal(history, drafts, probs, last, in_step), pages

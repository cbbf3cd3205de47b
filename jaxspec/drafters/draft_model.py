"""Drafters by a second, smaller model, which proposes K tokens and has its own pages of KV cache.

Source: Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.errors import UserError
from jaxspec.common.shapes import Array, Bool, Int
from jaxspec.drafters.base import Choose, Chunk, Drafter, History, ModelParams, Proposal, Rank
from jaxspec.drafters.chain import Step, at_once, chain
from jaxspec.drafters.trees.growth import Grown, Nodes, Shape, grow_tree, nodes_at
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row
from pallas_kernels.merge_tokens import merge_tokens


@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """A drafter that runs a smaller model autoregressively, once for each draft token."""

    model: PagedModel
    # Maximum number of tokens before the pending one that the draft cache may lack: a round's first pass, two tokens
    # wide, reads one such token and the pending one.
    max_lag: int = 1

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        own, table = params["draft"], history.block_table
        (tokens, positions, masked), missing = self.first_pass_tokens(history)
        masked |= ~history.live[:, None]
        done = self.model.forward(own, cache.draft, tokens, positions, masked, table)

        def step(pages: tuple[LayerCache, ...], token: Int[Array, " B"], i: Any) -> Step:
            positions = (history.num_tokens + i - 1)[:, None]
            masked = (~history.live | (history.num_wanted <= i))[:, None]
            done = self.model.forward(own, pages, token[:, None], positions, masked, table)
            return Step(done.decoder, done.hidden[:, 0], done.pages)

        first = Step(done.decoder, take_row(done.hidden, missing), done.pages)
        drafts, probs, pages = chain(self.num_speculative_tokens, first, step, choose)
        # A draft cache that trails by more than the first pass covers keeps its length until prefill fills the gap.
        in_step = history.draft_len >= history.num_tokens - 1 - self.max_lag
        read = history.num_tokens + jnp.maximum(history.num_wanted, 1) - 1
        draft_len = jnp.where(in_step, read, history.draft_len)
        return Proposal(drafts, probs, jnp.where(history.live, history.num_wanted, 0), draft_len), pages

    def first_pass_tokens(
        self, history: History
    ) -> tuple[tuple[Int[Array, "B 2"], Int[Array, "B 2"], Bool[Array, "B 2"]], Int[Array, " B"]]:
        """Return (tokens, positions, masked) of a round's first pass, and the index of the pending token in that pass.

        The pending token is the newest committed token, which no cache holds yet. After a round in which all drafts
        were accepted, the draft cache also lacks the last accepted draft. So the first pass is always two tokens wide:
        the token before the pending one, and the pending token. If the cache already holds the former, the pass reads
        the pending token first, and its second place is masked.
        """
        rows = history.num_tokens.shape[0]
        query_start = jnp.arange(rows + 1, dtype=jnp.int32)
        has_it = (history.draft_len == history.num_tokens - 1).astype(jnp.int32)
        last_accepted = take_row(history.tokens, jnp.maximum(history.num_tokens - 2, 0))
        pending = take_row(history.tokens, jnp.maximum(history.num_tokens - 1, 0))
        how: dict[str, Any] = self.model.backend.how()
        tokens, rejected = merge_tokens(last_accepted, pending, query_start, has_it, **how)
        before = jnp.maximum(history.num_tokens - 2, 0)
        positions, _ = merge_tokens(before, history.num_tokens - 1, query_start, has_it, **how)
        pairs = tokens.reshape(rows, 2), positions.reshape(rows, 2), rejected.reshape(rows, 2)
        return pairs, 1 - has_it

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        return self.model.prefill(params["draft"], cache.draft, *chunk.arrays).pages


@dataclasses.dataclass(frozen=True)
class ParallelDraftModel(Drafter):
    """A drafter whose model drafts all K tokens in one pass (PARD).

    The pass reads the committed tokens that the draft's KV cache lacks, and K - 1 mask tokens.
    Source: An et al., https://arxiv.org/abs/2504.18583.

    most: the engine's largest K, or the depth of its draft trees; the draft cache may lack that many tokens before the
      pending one.
    """

    most: int
    model: PagedModel

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len

    @property
    def max_lag(self) -> int:
        return self.most

    @property
    def independent(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return 1

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        count, last = self.num_speculative_tokens, history.num_tokens - 1
        mask: Any = self.model.config.mask_id
        in_step = history.draft_len >= last - self.max_lag
        wanted = jnp.where(history.live & in_step, history.num_wanted, 0)
        start = jnp.clip(history.draft_len, jnp.maximum(last - self.most, 0), last)
        positions = start[:, None] + jnp.arange(self.most + count, dtype=jnp.int32)
        known = jnp.take_along_axis(history.tokens, positions, axis=1, mode="clip")
        tokens = jnp.where(positions <= last[:, None], known, mask)
        masked = (positions > (last + jnp.maximum(wanted, 1) - 1)[:, None]) | ~history.live[:, None]
        done = self.model.forward(params["draft"], cache.draft, tokens, positions, masked, history.block_table)
        at = jnp.minimum((last - start)[:, None] + jnp.arange(count), positions.shape[1] - 1)
        hidden = jnp.take_along_axis(done.hidden, at[:, :, None], axis=1)
        drafts, probs = at_once(done.decoder, hidden, choose)
        # draft_len leaves out the mask tokens' keys and values: they are useless, and the next round overwrites them.
        return Proposal(drafts, probs, wanted, jnp.where(in_step, last + 1, history.draft_len)), done.pages

    def prefill(self, params: ModelParams, cache: PagedKVCache, chunk: Chunk) -> tuple[LayerCache, ...]:
        return self.model.prefill(params["draft"], cache.draft, *chunk.arrays).pages


@dataclasses.dataclass(frozen=True)
class DraftModelTree(DraftModel):
    """A drafter that runs a smaller model once for each level of a draft tree.

    Keys and values of the tree's nodes do not stay in the draft's KV cache. The next round's first pass recomputes
    those of accepted drafts.
    """

    max_lag: int = dataclasses.field(kw_only=True)

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Shape, rank: Rank
    ) -> tuple[Proposal, Grown, tuple[LayerCache, ...]]:
        own, last = params["draft"], history.num_tokens - 1
        start = jnp.clip(history.draft_len, jnp.maximum(last - self.max_lag, 0), last)
        positions = start[:, None] + jnp.arange(self.max_lag + 1, dtype=jnp.int32)
        masked = (positions > last[:, None]) | ~history.live[:, None]
        tokens = jnp.take_along_axis(history.tokens, positions, axis=1, mode="clip")
        done = self.model.forward(own, cache.draft, tokens, positions, masked, history.block_table)

        def step(pages: tuple[LayerCache, ...], nodes: Nodes, level: Any) -> Step:
            slots, masked, table, branches = nodes_at(last + 1, level, nodes, last + level, history)
            done = self.model.forward(own, pages, nodes.tokens, slots, masked, table, branches=branches)
            return Step(done.decoder, done.hidden, done.pages)

        grown, pages = grow_tree(shape, Step(done.decoder, take_row(done.hidden, last - start), done.pages), step, rank)
        in_step = history.draft_len >= last - self.max_lag
        wanted = jnp.where(history.live & in_step, history.num_wanted, 0)
        return Proposal(grown.tokens, None, wanted, jnp.where(in_step, last + 1, history.draft_len)), grown, pages


def drafter(k: int, most: int, models: Mapping[str, PagedModel], speculative: Any) -> Drafter:
    """Return the drafter that uses a smaller model. The arguments are those in `jaxspec.drafters.methods`."""
    model = models["draft"]
    if in_parallel(model, speculative):
        return ParallelDraftModel(k, most, model)
    if speculative.tree:
        return DraftModelTree(k, model, max_lag=most)
    return DraftModel(k, model)


def in_parallel(model: PagedModel, speculative: Any) -> bool:
    """Return whether the draft, a model or an EAGLE-3 head, drafts all K tokens in one pass.

    The speculation option parallel_drafting decides. If the option is not set, a draft with a mask token does so.

    Raises:
      UserError: parallel_drafting is True, and the draft has no mask token.
    """
    asked = speculative.parallel_drafting
    able = model.config.mask_id is not None
    if asked and not able:
        raise UserError(
            "parallel_drafting=True, but the draft's config.json names no mask token (pard_token, "
            "ptd_token_id): use a draft that was trained for it, or leave parallel_drafting out"
        )
    return able if asked is None else asked

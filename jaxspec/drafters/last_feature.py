"""Drafters that read the target's last hidden state at one position only. They have no KV cache."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import features
from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.drafters.base import Choose, Drafter, History, ModelParams, Proposal, Rank, target_parameters
from jaxspec.drafters.chain import Step
from jaxspec.drafters.trees.growth import Grown, Nodes, Shape, grow_tree
from jaxspec.models.decoder import bind
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row


@dataclasses.dataclass(frozen=True)
class LastFeature(Drafter):
    """A drafter that uses a head (a small network) which reads the target's last hidden state at one position only.

    This is the newest position that the target has read. The head may also read the tokens drafted so far.

    model: the drafting head.
    target: the model that the head drafts for.
    """

    model: PagedModel
    target: PagedModel

    @property
    def features_width(self) -> int:
        return draft_spec(self.model.config).features_width

    @property
    def passes(self) -> float:
        config: Any = self.model.config
        result: float = self.num_speculative_tokens / config.num_drafts
        return result

    @abc.abstractmethod
    def begin(self, head: Any, hidden: Any) -> Any:
        """Return the state that the drafting head reads for the first draft.

        head: the drafting head.
        hidden [B,E]: the target's hidden states at the token before the pending token. The pending token is accepted,
          but the target has not read it yet.
        """

    @abc.abstractmethod
    def draft(self, head: Any, state: Any, token: Any, i: int) -> tuple[Any, Any, Any]:
        """Run the drafting head for draft i, which follows `token`.

        Return the `Head` that computes the logits (None for the target's), its input hidden states [B,E], and the next
        draft's state.
        """

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        step, state, token = self.start(params, cache, history)
        drafts = jnp.zeros((token.shape[0], self.num_speculative_tokens), jnp.int32)
        probs = []
        for i in range(self.num_speculative_tokens):  # a Python loop, not `chain`, since each step has its own weights
            head, hidden, state = step(state, token, i)
            token, q = choose(head, hidden, drafts, i)
            drafts = drafts.at[:, i].set(token)
            probs.append(q)
        together = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *probs)
        return Proposal(drafts, together, self.wanted(history)), cache.draft

    def grow(
        self, params: ModelParams, cache: PagedKVCache, history: History, shape: Shape, rank: Rank
    ) -> tuple[Proposal, Grown, tuple[LayerCache, ...]]:
        step, state, token = self.start(params, cache, history)
        head, hidden, state = step(state, token, 0)

        def next_level(state: Any, nodes: Nodes, level: Any) -> Step:
            return step(jnp.take_along_axis(state, nodes.after[:, :, None], axis=1), nodes.tokens, level)

        first = Step(head, hidden, jnp.repeat(state[:, None], shape.width, axis=1))
        grown, _ = grow_tree(shape, first, next_level, rank, alike=False)
        return Proposal(grown.tokens, None, self.wanted(history)), grown, cache.draft

    def start(self, params: ModelParams, cache: PagedKVCache, history: History) -> tuple[Callable[..., Step], Any, Any]:
        """Prepare a round. Return a function step(state, token, i), the first state, and the pending token i32[B].

        The function runs the drafting head for draft i. The pending token is accepted, but no cache holds it yet.
        """

        def bound_head() -> Any:  # the drafting head, bound again in each step: see `FeatureChain.logits_head`
            return bind(self.model.config, params["draft"])

        last = jnp.maximum(history.num_tokens - 2, 0)
        known = features.read(cache, last[:, None], history.block_table, self.model.backend.placement)
        state = self.begin(bound_head(), known[:, 0])

        def step(state: Any, token: Any, i: Any) -> Step:
            head, hidden, state = self.draft(bound_head(), state, token, i)
            if head is None:
                head = bind(self.target.config, target_parameters(params))
            return Step(head, hidden, state)

        return step, state, take_row(history.tokens, history.num_tokens - 1)

    def wanted(self, history: History) -> Any:
        """Return each row's number of drafts.

        It is 0 after a prompt of one token: the target has not read that token yet, so there is no hidden state.
        """
        return jnp.where(history.live & (history.num_tokens > 1), history.num_wanted, 0)

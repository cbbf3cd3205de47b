"""Drafts from the target's last hidden state alone: no cache of its own, so nothing that could lag."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import features
from jaxspec.drafters.base import Choose, Drafter, History, Proposal, Rank, lender
from jaxspec.drafters.chain import Step
from jaxspec.drafters.trees.tree import Nodes, Shape, grown
from jaxspec.models.decoder import bind
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row


@dataclasses.dataclass(frozen=True)
class LastFeature(Drafter):
    """model: the head, whose module the subclass asks for its drafts."""

    model: PagedModel
    target: PagedModel

    @property
    def features_width(self) -> int:
        return draft_spec(self.model.config).features_width

    @property
    def passes(self) -> float:
        config: Any = self.model.config
        return self.num_speculative_tokens / config.num_drafts

    @abc.abstractmethod
    def begin(self, head: Any, hidden: Any) -> Any:
        """hidden [B,E], the target's at the token before the pending one -> what the first draft is made of."""

    @abc.abstractmethod
    def draft(self, head: Any, state: Any, token: Any, i: int) -> tuple[Any, Any, Any]:
        """(what has logits, what they are made of, the next state), of draft i, after this token."""

    def propose(self, params, cache, history: History, choose: Choose):
        step, state, token = self.start(params, cache, history)
        drafts, probs = jnp.zeros((token.shape[0], self.num_speculative_tokens), jnp.int32), []
        for i in range(self.num_speculative_tokens):  # each has weights of its own
            head, hidden, state = step(state, token, i)
            token, q = choose(head, hidden, drafts, i)
            drafts = drafts.at[:, i].set(token)
            probs.append(q)
        together = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *probs)
        return Proposal(drafts, together, self.wanted(history)), cache.draft

    def grow(self, params, cache, history: History, shape: Shape, rank: Rank):
        step, state, token = self.start(params, cache, history)
        head, hidden, state = step(state, token, 0)

        def next_level(state, nodes: Nodes, level) -> Step:
            return step(jnp.take_along_axis(state, nodes.after[:, :, None], axis=1), nodes.tokens, level)

        first = Step(head, hidden, jnp.repeat(state[:, None], shape.width, axis=1))
        kept, _ = grown(shape, first, next_level, rank, alike=False)
        return Proposal(kept[0], None, self.wanted(history)), kept, cache.draft

    def start(self, params, cache, history: History) -> tuple[Callable[..., Step], Any, Any]:
        """(a step from a state and a token, the first state, the pending token)."""
        own: Callable[[], Any] = lambda: bind(self.model.config, params["draft"])  # anew within loops, see FeatureChain
        last = jnp.maximum(history.num_tokens - 2, 0)
        known = features.read(cache, last[:, None], history.block_table, self.model.backend.placement)
        state = self.begin(own(), known[:, 0])

        def step(state, token, i) -> Step:
            head, hidden, state = self.draft(own(), state, token, i)
            return Step(bind(self.target.config, lender(params)) if head is None else head, hidden, state)

        return step, state, take_row(history.tokens, history.num_tokens - 1)

    def wanted(self, history: History) -> Any:
        """Of a prompt of one token the target has said nothing yet."""
        return jnp.where(history.live & (history.num_tokens > 1), history.num_wanted, 0)

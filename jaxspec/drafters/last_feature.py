"""Drafters that read only the target's last hidden state. They have no cache."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import features
from jaxspec.drafters.base import Choose, Drafter, History, Proposal, Rank, target_parameters
from jaxspec.drafters.chain import Step
from jaxspec.drafters.trees.growth import Nodes, Shape, grow_tree
from jaxspec.models.decoder import bind
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row


@dataclasses.dataclass(frozen=True)
class LastFeature(Drafter):
    """A drafter that reads only the target's last hidden state.

    model: the head.
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
        return self.num_speculative_tokens / config.num_drafts

    @abc.abstractmethod
    def begin(self, head: Any, hidden: Any) -> Any:
        """Return the state of the first draft. hidden [B,E]: the target's, at the token before the pending one."""

    @abc.abstractmethod
    def draft(self, head: Any, state: Any, token: Any, i: int) -> tuple[Any, Any, Any]:
        """Run the head for draft i, after `token`.

        Return a `Head` or None for the target's, the hidden states [B,E] of its logits, and the next state.
        """

    def propose(self, params, cache, history: History, choose: Choose):
        step, state, token = self.start(params, cache, history)
        drafts = jnp.zeros((token.shape[0], self.num_speculative_tokens), jnp.int32)
        probs = []
        for i in range(self.num_speculative_tokens):  # not `chain`: each step has its own weights
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
        grown, _ = grow_tree(shape, first, next_level, rank, alike=False)
        return Proposal(grown.tokens, None, self.wanted(history)), grown, cache.draft

    def start(self, params, cache, history: History) -> tuple[Callable[..., Step], Any, Any]:
        """Return step(state, token, i), which runs the head for draft i, the first state, and the pending token."""

        def bound_head() -> Any:  # bound again in each step, see `FeatureChain.logits_head`
            return bind(self.model.config, params["draft"])

        last = jnp.maximum(history.num_tokens - 2, 0)
        known = features.read(cache, last[:, None], history.block_table, self.model.backend.placement)
        state = self.begin(bound_head(), known[:, 0])

        def step(state, token, i) -> Step:
            head, hidden, state = self.draft(bound_head(), state, token, i)
            if head is None:
                head = bind(self.target.config, target_parameters(params))
            return Step(head, hidden, state)

        return step, state, take_row(history.tokens, history.num_tokens - 1)

    def wanted(self, history: History) -> Any:
        """Return the number of drafts: 0 for a prompt of one token, for which the target has no hidden state yet."""
        return jnp.where(history.live & (history.num_tokens > 1), history.num_wanted, 0)

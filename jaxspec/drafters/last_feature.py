"""Drafts from the target's last hidden state alone: no cache of its own, so nothing that could lag."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxspec.cache import features
from jaxspec.drafters.base import Choose, Drafter, History, Proposal
from jaxspec.models.decoder import bind
from jaxspec.models.paged import PagedModel
from jaxspec.sampling.rng import take_row


@dataclasses.dataclass(frozen=True)
class LastFeature(Drafter):
    """model: the head, whose module the subclass asks for its drafts."""

    model: PagedModel
    target: PagedModel

    @property
    def features_width(self) -> int:
        return self.model.config.features_width

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
        head: Any = bind(self.model.config, params["draft"])
        last = history.num_tokens - 2
        at, mesh = jnp.maximum(last, 0)[:, None], self.model.backend.mesh
        state = self.begin(head, features.read(cache, at, history.block_table, mesh)[:, 0])
        token = take_row(history.tokens, history.num_tokens - 1)
        drafts, probs = jnp.zeros((token.shape[0], self.num_speculative_tokens), jnp.int32), []
        for i in range(self.num_speculative_tokens):  # each has weights of its own
            logits, hidden, state = self.draft(head, state, token, i)
            if logits is None:
                logits = bind(self.target.config, params["target"])
            token, q = choose(logits, hidden, drafts, i)
            drafts = drafts.at[:, i].set(token)
            probs.append(q)
        together = None if probs[0] is None else jnp.stack(probs, axis=1)
        return Proposal(drafts, together, jnp.where(history.live & (last >= 0), history.num_wanted, 0)), cache.draft

"""Prompt lookup where it finds something, another drafter elsewhere.

The drafter reads what was looked up as if it had proposed it, so its cache stays in step, and it goes on where the
looked-up tokens end.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import Choose, Chunk, Drafter, History
from jaxspec.drafters.ngram import NGram


@dataclasses.dataclass(frozen=True)
class Combined(Drafter):
    lookup: NGram
    draft: Drafter
    backend = property(lambda self: self.draft.backend)

    # What the drafter needs, this needs.
    max_model_len = property(lambda self: self.draft.max_model_len)
    max_lag = property(lambda self: self.draft.max_lag)
    reach = property(lambda self: self.draft.reach)
    lookahead = property(lambda self: self.draft.lookahead)
    passes = property(lambda self: self.draft.passes)
    taps = property(lambda self: self.draft.taps)
    features_width = property(lambda self: self.draft.features_width)

    def features(self, params, hidden, tapped):
        return self.draft.features(params, hidden, tapped)

    def prefill(self, params, cache, chunk: Chunk):
        return self.draft.prefill(params, cache, chunk)

    def propose(self, params, cache, history: History, choose: Choose):
        found, _ = self.lookup.propose(params, cache, history, choose)

        def choose_or_look_up(head, hidden, drafts, i):
            token, probs = choose(head, hidden, drafts, i)
            use = i < found.num_proposed
            token = jnp.where(use, lax.dynamic_index_in_dim(found.tokens, i, axis=1, keepdims=False), token)
            if probs is not None:  # what was looked up is certain
                probs = jnp.where(use[:, None], jax.nn.one_hot(token, probs.shape[-1], dtype=probs.dtype), probs)
            return token, probs

        return self.draft.propose(params, cache, history, choose_or_look_up)

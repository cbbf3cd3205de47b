"""Prompt lookup where it finds something, the draft model elsewhere.

The draft model reads what was looked up as if it had proposed it, so its cache stays in step, and it goes on where the
looked-up tokens end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import Choose, Chunk, History, Proposal
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram


@dataclasses.dataclass(frozen=True)
class Combined:
    lookup: NGram
    draft: DraftModel

    @property
    def num_speculative_tokens(self) -> int:
        return self.draft.num_speculative_tokens

    @property
    def max_model_len(self) -> int:
        return self.draft.max_model_len

    def propose(self, params, pages, history: History, choose: Choose) -> tuple[Proposal, Any]:
        found, _ = self.lookup.propose(None, None, history, choose)

        def choose_or_look_up(decoder, hidden, drafts, i):
            token, probs = choose(decoder, hidden, drafts, i)
            use = i < found.num_proposed
            token = jnp.where(use, lax.dynamic_index_in_dim(found.tokens, i, axis=1, keepdims=False), token)
            if probs is not None:  # what was looked up is certain
                probs = jnp.where(use[:, None], jax.nn.one_hot(token, probs.shape[-1], dtype=probs.dtype), probs)
            return token, probs

        return self.draft.propose(params, pages, history, choose_or_look_up)

    def prefill(self, params, pages, chunk: Chunk):
        return self.draft.prefill(params, pages, chunk)

"""Prompt lookup combined with another drafter.

The looked-up tokens replace the other drafter's first drafts. That drafter reads the looked-up tokens as if they were
its own, so its KV cache has no gaps. It continues after the last looked-up token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.layer import LayerCache
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Choose, Drafter, History, ModelParams, Proposal
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Combined(Wrapper):
    """A drafter that first proposes the tokens that prompt lookup finds, then continues with the drafter `draft`.

    lookup: the drafter by prompt lookup.
    draft: the drafter that continues.
    """

    lookup: NGram
    draft: Drafter

    def propose(
        self, params: ModelParams, cache: PagedKVCache, history: History, choose: Choose
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        found, _ = self.lookup.propose(params, cache, history, choose)

        def choose_or_look_up(
            head: Any, hidden: Float[Array, "B _"], drafts: Int[Array, "B K"], i: Any
        ) -> tuple[Int[Array, " B"], Any]:
            token, probs = choose(head, hidden, drafts, i)
            use = i < found.num_proposed
            token = jnp.where(use, lax.dynamic_index_in_dim(found.tokens, i, axis=1, keepdims=False), token)
            if probs is not None:  # the distribution q of a looked-up token is one-hot
                probs = jnp.where(use[:, None], jax.nn.one_hot(token, probs.shape[-1], dtype=probs.dtype), probs)
            return token, probs

        proposal, pages = self.draft.propose(params, cache, history, choose_or_look_up)
        return dataclasses.replace(proposal, looked_up=found.num_proposed), pages

"""The device program: many rounds in one `lax.while_loop`, one launch, one transfer back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.round import Params, round, runnable
from jaxspec.decode.state import MAX_ROUNDS, RUNNING, DecodeConfig, DecodeState, LaunchInput, LaunchResult


def launch(
    config: DecodeConfig,
    params: Params,
    cache: PagedKVCache,
    batch: LaunchInput,
    num_rounds: jax.Array,
    stop_on_finish: jax.Array,
) -> tuple[PagedKVCache, LaunchResult]:
    """Runs rounds until num_rounds i32[] (at most MAX_ROUNDS) are done, no row can run any more, or, where
    stop_on_finish bool[] asks for it, a row has finished."""
    first = start_state(config, batch)

    def going(carry):
        done, _, state = carry
        early = stop_on_finish & jnp.any(state.finish != RUNNING)
        return (done < jnp.minimum(num_rounds, MAX_ROUNDS)) & jnp.any(runnable(config, batch, state)) & ~early

    def body(carry):
        done, cache, state = carry
        return done + 1, *round(config, params, cache, batch, state)

    done, cache, state = lax.while_loop(going, body, (jnp.int32(0), cache, first))
    return cache, result(config, batch, state, done)


def start_state(config: DecodeConfig, batch: LaunchInput) -> DecodeState:
    zeros = jnp.zeros_like(batch.num_tokens)
    return DecodeState(
        tokens=batch.tokens,
        num_tokens=batch.num_tokens,
        draft_len=batch.draft_len,
        finish=zeros,
        num_drafts=zeros,
        num_draft_tokens=zeros,
        num_accepted_per_pos=jnp.zeros((zeros.shape[0], config.num_speculative_tokens), jnp.int32),
    )


def result(config: DecodeConfig, batch: LaunchInput, state: DecodeState, num_rounds: jax.Array) -> LaunchResult:
    """The new tokens are read off the history buffer once, at the end."""
    offset = jnp.arange(MAX_ROUNDS * (config.num_speculative_tokens + 1), dtype=jnp.int32)[None, :]
    at = jnp.minimum(batch.num_tokens[:, None] + offset, state.tokens.shape[1] - 1)
    return LaunchResult(
        new_tokens=jnp.take_along_axis(state.tokens, at, axis=1),
        num_new=state.num_tokens - batch.num_tokens,
        finish=state.finish,
        draft_len=state.draft_len,
        num_drafts=state.num_drafts,
        num_draft_tokens=state.num_draft_tokens,
        num_accepted_per_pos=state.num_accepted_per_pos,
        num_rounds=num_rounds,
    )

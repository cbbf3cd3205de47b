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

    def going(carry):
        _, state = carry
        early = stop_on_finish & jnp.any(state.finish != RUNNING)
        return (state.round < jnp.minimum(num_rounds, MAX_ROUNDS)) & jnp.any(runnable(config, batch, state)) & ~early

    def body(carry):
        return round(config, params, carry[0], batch, carry[1])

    cache, state = lax.while_loop(going, body, (cache, start_state(batch)))
    return cache, result(config, batch, state)


def start_state(batch: LaunchInput) -> DecodeState:
    per_round = jnp.zeros((batch.num_tokens.shape[0], MAX_ROUNDS), jnp.int32)
    return DecodeState(
        tokens=batch.tokens,
        num_tokens=batch.num_tokens,
        draft_len=batch.draft_len,
        finish=jnp.zeros_like(batch.num_tokens),
        round=jnp.int32(0),
        proposed=per_round,
        accepted=per_round,
        emitted=per_round,
    )


def result(config: DecodeConfig, batch: LaunchInput, state: DecodeState) -> LaunchResult:
    """The new tokens are read off the history buffer once, at the end."""
    offset = jnp.arange(MAX_ROUNDS * (config.num_speculative_tokens + 1), dtype=jnp.int32)[None, :]
    at = jnp.minimum(batch.num_tokens[:, None] + offset, state.tokens.shape[1] - 1)
    return LaunchResult(
        new_tokens=jnp.take_along_axis(state.tokens, at, axis=1),
        num_new=state.num_tokens - batch.num_tokens,
        finish=state.finish,
        draft_len=state.draft_len,
        proposed=state.proposed,
        accepted=state.accepted,
        emitted=state.emitted,
        num_rounds=state.round,
    )

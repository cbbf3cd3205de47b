"""The device program of a launch: many rounds in one `lax.while_loop`. Their results go to the host in one transfer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.round import run_round, runnable
from jaxspec.decode.state import (
    RUNNING,
    Context,
    DecodeConfig,
    DecodeState,
    LaunchInput,
    LaunchResult,
    ModelParams,
    text_of,
)
from jaxspec.options.engine import MAX_ROUNDS
from jaxspec.sampling import logprobs, processors, rng

# A launch ends when its rows have fallen behind plain decoding by the tokens of more than this number of rounds.
PATIENCE = 2.0


def launch(
    config: DecodeConfig, params: ModelParams, cache: PagedKVCache, batch: LaunchInput
) -> tuple[PagedKVCache, LaunchResult]:
    """Run rounds until a limit of batch.control is reached or no row is runnable. Return the caches and the result."""
    context = begin(config, params, batch)
    control = batch.control

    def another_round(state: DecodeState) -> jax.Array:
        """Return whether another round follows.

        This is computed at the end of a round and not in the loop's condition, so that on GPU the host waits for only
        one flag between two rounds.
        """
        more = state.round < jnp.minimum(control.num_rounds, MAX_ROUNDS)
        # Without the barrier the compiler fuses the sums below with updates of the loop's carry, and copies the carry.
        state = lax.optimization_barrier(dataclasses.replace(state, round=None))  # type: ignore[arg-type]  # unread
        early = jnp.sum(state.finish != RUNNING) >= control.max_ends
        return more & jnp.any(runnable(context, state)) & ~early & ~too_slow(batch, state)

    def body(carry: tuple[PagedKVCache, DecodeState, jax.Array]) -> tuple[PagedKVCache, DecodeState, jax.Array]:
        cache, state, _ = carry
        cache, state = run_round(context, cache, state)
        return cache, state, another_round(state)

    start = start_state(context)
    cache, state, _ = lax.while_loop(lambda carry: carry[-1], body, (cache, start, another_round(start)))
    return cache, result(context, state)


def begin(config: DecodeConfig, params: ModelParams, batch: LaunchInput) -> Context:
    """Return the constants of a launch, computed once and outside the loop.

    They are the tables of the logits processors, the capacity of each row's pages, and the rows' seeds.
    """
    layout = config.target.layout
    rows = batch.sampling
    tables = processors.tables(
        batch.processors, text_of(config, batch, batch.tokens, batch.num_tokens), params.get("grammars")
    )
    capacity = jnp.sum(batch.block_table < layout.num_pages, axis=1) * layout.page_size
    rows = dataclasses.replace(rows, seed=rng.of_seed(rows.seed))
    return Context(config, params, dataclasses.replace(batch, sampling=rows), tables, capacity)


def too_slow(batch: LaunchInput, state: DecodeState) -> jax.Array:
    """Return whether plain decoding would have been faster in this launch so far.

    In the time of each round it would have given a row `Control.worth` tokens. The rows have to have fallen behind by
    more than PATIENCE times that number on average.
    """
    worth = jnp.minimum(batch.control.worth, 1e30)  # infinity times 0 rounds would be NaN
    gained = state.num_tokens - batch.num_tokens
    return jnp.sum(worth * (state.rounds_of - PATIENCE * batch.live) - gained) > 0


def start_state(context: Context) -> DecodeState:
    """Return the state before a launch's first round."""
    config, batch = context.config, context.batch
    num_rows = batch.num_tokens.shape[0]
    n = config.variant.logprobs
    return DecodeState(
        tokens=batch.tokens,
        num_tokens=batch.num_tokens,
        draft_len=batch.draft_len,
        finish=jnp.zeros_like(batch.num_tokens),
        without_drafts=jnp.zeros_like(batch.live),
        round=jnp.int32(0),
        rounds_of=jnp.zeros_like(batch.num_tokens),
        log=jnp.zeros((4, num_rows, MAX_ROUNDS), jnp.int32),
        processing=processors.init(batch.processors, text_of(config, batch, batch.tokens, batch.num_tokens)),
        logprobs=None if n is None else logprobs.empty(num_rows, max_new_tokens(config), n),
    )


def max_new_tokens(config: DecodeConfig) -> int:
    """Return the maximum number of tokens that a row can gain in a launch."""
    return MAX_ROUNDS * (config.num_speculative_tokens + 1)


def result(context: Context, state: DecodeState) -> LaunchResult:
    """Return the result of a launch. The new tokens are read from `state.tokens` once, after the last round."""
    offset = jnp.arange(max_new_tokens(context.config), dtype=jnp.int32)[None, :]
    start = context.batch.num_tokens
    at = jnp.minimum(start[:, None] + offset, state.tokens.shape[1] - 1)
    proposed, accepted, emitted, looked_up = state.log
    return LaunchResult(
        new_tokens=jnp.take_along_axis(state.tokens, at, axis=1),
        num_new=state.num_tokens - start,
        finish=state.finish,
        draft_len=state.draft_len,
        proposed=proposed,
        accepted=accepted,
        emitted=emitted,
        looked_up=looked_up,
        num_rounds=state.round,
        logprobs=state.logprobs,
    )

"""The device program: many rounds in one `lax.while_loop`, one launch, one transfer back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.round import round, runnable, text_of
from jaxspec.decode.state import RUNNING, Context, DecodeConfig, DecodeState, LaunchInput, LaunchResult, Params
from jaxspec.options.engine import MAX_ROUNDS
from jaxspec.sampling import logprobs, processors, rng

PATIENCE = 2.0  # rounds that a launch may fall behind before it is given up


def launch(
    config: DecodeConfig, params: Params, cache: PagedKVCache, batch: LaunchInput
) -> tuple[PagedKVCache, LaunchResult]:
    """Runs rounds until batch.control ends them, or no row can run any more."""
    context, control = begin(config, params, batch), batch.control

    def going(state):
        """Whether there is another round. Computed at the end of a round, not as the loop's condition: what a GPU's
        host waits for between two rounds is then no more than a flag."""
        more = state.round < jnp.minimum(control.num_rounds, MAX_ROUNDS)
        # Behind a barrier, or the compiler would sum up where it updates, and copy the carry.
        state = lax.optimization_barrier(dataclasses.replace(state, round=None))
        early = jnp.sum(state.finish != RUNNING) >= control.max_ends
        return more & jnp.any(runnable(context, state)) & ~early & ~losing(batch, state)

    def body(carry):
        cache, state, _ = carry
        cache, state = round(context, cache, state)
        return cache, state, going(state)

    start = start_state(context)
    cache, state, _ = lax.while_loop(lambda carry: carry[-1], body, (cache, start, going(start)))
    return cache, result(context, state)


def begin(config: DecodeConfig, params: Params, batch: LaunchInput) -> Context:
    """What is dense, or takes a sum, is made here, once a launch and outside the loop."""
    layout, rows = config.target.layout, batch.sampling
    tables = processors.tables(batch.processors, text_of(config, batch, batch.tokens, batch.num_tokens))
    capacity = jnp.sum(batch.block_table < layout.num_pages, axis=1) * layout.page_size
    rows = dataclasses.replace(rows, seed=rng.of_seed(rows.seed))
    return Context(config, params, dataclasses.replace(batch, sampling=rows), tables, capacity)


def losing(batch: LaunchInput, state: DecodeState) -> jax.Array:
    """Whether the rows are more than PATIENCE rounds behind what their rounds were worth."""
    worth = jnp.minimum(batch.control.worth, 1e30)  # infinity times no round would be no number
    gained = state.num_tokens - batch.num_tokens
    return jnp.sum(worth * (state.rounds_of - PATIENCE * batch.live) - gained) > 0


def start_state(context: Context) -> DecodeState:
    config, batch = context.config, context.batch
    num_rows, n = batch.num_tokens.shape[0], config.variant.logprobs
    return DecodeState(
        tokens=batch.tokens,
        num_tokens=batch.num_tokens,
        draft_len=batch.draft_len,
        finish=jnp.zeros_like(batch.num_tokens),
        spoilt=jnp.zeros_like(batch.live),
        round=jnp.int32(0),
        rounds_of=jnp.zeros_like(batch.num_tokens),
        log=jnp.zeros((3, num_rows, MAX_ROUNDS), jnp.int32),
        processing=processors.init(batch.processors, text_of(config, batch, batch.tokens, batch.num_tokens)),
        logprobs=None if n is None else logprobs.empty(num_rows, most_new(config), n),
    )


def most_new(config: DecodeConfig) -> int:
    """Tokens that a row may gain in a launch."""
    return MAX_ROUNDS * (config.num_speculative_tokens + 1)


def result(context: Context, state: DecodeState) -> LaunchResult:
    """The new tokens are read off the history buffer once, at the end."""
    offset = jnp.arange(most_new(context.config), dtype=jnp.int32)[None, :]
    start = context.batch.num_tokens
    at = jnp.minimum(start[:, None] + offset, state.tokens.shape[1] - 1)
    proposed, accepted, emitted = state.log
    return LaunchResult(
        new_tokens=jnp.take_along_axis(state.tokens, at, axis=1),
        num_new=state.num_tokens - start,
        finish=state.finish,
        draft_len=state.draft_len,
        proposed=proposed,
        accepted=accepted,
        emitted=emitted,
        num_rounds=state.round,
        logprobs=state.logprobs,
    )

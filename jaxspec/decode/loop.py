"""The device program of a launch: many rounds in one `lax.while_loop`. Their results go to the host in one transfer."""

from __future__ import annotations

import dataclasses
from typing import Any

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
# Spare rows replace ended rows once 1 / ACTIVE_PER_END of the active rows have ended. To replace fewer at a time would
# cost more than leaving their places idle until then.
ACTIVE_PER_END = 32


def launch(
    config: DecodeConfig, params: ModelParams, cache: PagedKVCache, batch: LaunchInput
) -> tuple[PagedKVCache, LaunchResult]:
    """Run rounds until a limit of batch.control is reached or no row is runnable. Return the caches and the result.

    Each round runs as many rows as `batch.active` lists, at first those. The other rows of the batch are spare: they
    replace rows that have ended, a few at a time.
    """
    whole = begin(config, params, batch)
    start = start_state(whole)
    if batch.active.shape == batch.num_tokens.shape:
        cache, state = run_rounds(whole, cache, start, batch.control.max_ends)
        return cache, result(whole, state)

    def replace_and_run(
        carry: tuple[PagedKVCache, DecodeState, jax.Array, jax.Array],
    ) -> tuple[PagedKVCache, DecodeState, jax.Array, jax.Array]:
        """Run rounds of the active rows until enough of them ended. Return the rows that are active afterwards, too."""
        cache, state, active, _ = carry
        context = begin(config, params, of_rows(batch, active))
        part = rows_of(state, active)
        spare = num_running(batch, state) - num_running(context.batch, part)
        ended_before = num_ended(state) - num_ended(part)
        enough = jnp.minimum(spare, -(-active.size // ACTIVE_PER_END))
        max_ends = jnp.where(spare > 0, enough, batch.control.max_ends - ended_before)
        cache, part = run_rounds(context, cache, part, max_ends)
        state = with_rows(state, active, part)
        again = (spare > 0) & (num_ended(part) > 0) & has_rounds(context, part) & ~too_slow(context.batch, part)
        return cache, state, running_first(batch, state)[: active.size], again

    carry = (cache, start, batch.active, jnp.array(True))
    cache, state, _, _ = lax.while_loop(lambda carry: carry[-1], replace_and_run, carry)
    return cache, result(whole, state)


def run_rounds(
    context: Context, cache: PagedKVCache, start: DecodeState, max_ends: jax.Array
) -> tuple[PagedKVCache, DecodeState]:
    """Run rounds until a limit of `Control` is reached, max_ends rows have ended, or no row is runnable."""

    def another_round(state: DecodeState) -> jax.Array:
        """Return whether another round follows.

        This is computed at the end of a round and not in the loop's condition, so that on GPU the host waits for only
        one flag between two rounds.
        """
        more = has_rounds(context, state)
        # Without the barrier the compiler fuses the sums below with updates of the loop's carry, and copies the carry.
        state = lax.optimization_barrier(dataclasses.replace(state, round=None))  # type: ignore[arg-type]  # unread
        early = num_ended(state) >= max_ends
        return more & jnp.any(runnable(context, state)) & ~early & ~too_slow(context.batch, state)

    def body(carry: tuple[PagedKVCache, DecodeState, jax.Array]) -> tuple[PagedKVCache, DecodeState, jax.Array]:
        cache, state, _ = carry
        cache, state = run_round(context, cache, state)
        return cache, state, another_round(state)

    cache, state, _ = lax.while_loop(lambda carry: carry[-1], body, (cache, start, another_round(start)))
    return cache, state


def has_rounds(context: Context, state: DecodeState) -> jax.Array:
    """Return whether the launch may run another round."""
    return state.round < jnp.minimum(context.batch.control.num_rounds, MAX_ROUNDS)


def num_ended(state: DecodeState) -> jax.Array:
    """Return the number of rows that ended in this launch."""
    return jnp.sum(state.finish != RUNNING)


def num_running(batch: LaunchInput, state: DecodeState) -> jax.Array:
    """Return the number of rows that hold a request that has not ended."""
    return jnp.sum(running(batch, state))


def running(batch: LaunchInput, state: DecodeState) -> jax.Array:
    """Return whether each row holds a request that has not ended."""
    return batch.live & (state.finish == RUNNING)


def running_first(batch: LaunchInput, state: DecodeState) -> jax.Array:
    """Return the indices i32[B] of all rows, those that have not ended first, each kind in its order.

    The place of each row is counted. A sort would take longer to compile and to run.
    """
    first = running(batch, state)
    place = jnp.where(first, jnp.cumsum(first), jnp.sum(first) + jnp.cumsum(~first)) - 1
    return jnp.zeros_like(batch.active, shape=place.shape).at[place].set(jnp.arange(place.size))


def of_rows(batch: LaunchInput, rows: jax.Array) -> LaunchInput:
    """Return the input of these rows alone. rows: i32[_]."""
    common: dict[str, Any] = {"rule_options": batch.rule_options, "control": batch.control}
    without: dict[str, Any] = dict.fromkeys(common)
    own: LaunchInput = rows_of(dataclasses.replace(batch, **without), rows)
    return dataclasses.replace(own, active=jnp.arange(rows.size), **common)


def rows_of(tree: Any, rows: jax.Array) -> Any:
    """Return these rows of all arrays of a tree, and its scalars unchanged. rows: i32[_]."""
    return jax.tree.map(lambda x: x[rows] if x.ndim else x, tree)


def with_rows(state: DecodeState, rows: jax.Array, part: DecodeState) -> DecodeState:
    """Return the state with these rows replaced by those of `part`, and with its scalars. rows: i32[_]."""
    new: DecodeState = jax.tree.map(lambda x, own: x.at[rows].set(own) if x.ndim else own, state, part)
    return new


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
        log=jnp.zeros((num_rows, 4, MAX_ROUNDS), jnp.int32),
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
    proposed, accepted, emitted, looked_up = jnp.moveaxis(state.log, 1, 0)
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

"""The device program: many rounds in one `lax.while_loop`, one launch, one transfer back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.round import Params, round, runnable
from jaxspec.decode.state import MAX_ROUNDS, RUNNING, DecodeConfig, DecodeState, LaunchInput, LaunchResult
from jaxspec.sampling import logprobs, processors

PATIENCE = 2.0  # rounds that a launch may fall behind before it is given up


def launch(
    config: DecodeConfig,
    params: Params,
    cache: PagedKVCache,
    batch: LaunchInput,
    num_rounds: jax.Array,
    stop_on_finish: jax.Array,
    worth: jax.Array,
) -> tuple[PagedKVCache, LaunchResult]:
    """Runs rounds until num_rounds i32[] (at most MAX_ROUNDS) are done, no row can run any more, where stop_on_finish
    bool[] asks for it a row has finished, or the rows gain less than worth f32[] tokens a round: what plain decoding
    would have made in the same time, so that the host may choose another K."""
    vocab_size = config.target.config.vocab_size
    # Dense tables are made once a launch, outside the loop.
    tables = None
    if batch.processors is not None:
        tables = processors.tables(batch.processors, batch.tokens, vocab_size)

    def going(state):
        """(rows that can run another round, whether there is one). Computed at the end of a round, not as the loop's
        condition: what a GPU's host waits for between two rounds is then no more than a flag."""
        live = runnable(config, batch, state)
        early = stop_on_finish & jnp.any(state.finish != RUNNING)
        more = (state.round < jnp.minimum(num_rounds, MAX_ROUNDS)) & jnp.any(live)
        return live, more & ~early & ~losing(batch, state, worth)

    def body(carry):
        cache, state, live, _ = carry
        cache, state = round(config, params, cache, batch, tables, state, live)
        return cache, state, *going(state)

    start = start_state(config, batch)
    cache, state, *_ = lax.while_loop(lambda carry: carry[-1], body, (cache, start, *going(start)))
    return cache, result(config, batch, state)


def losing(batch: LaunchInput, state: DecodeState, worth: jax.Array) -> jax.Array:
    """Whether the rows are more than PATIENCE rounds behind what their rounds were worth."""
    rounds = jnp.sum(state.emitted > 0)
    patience = PATIENCE * jnp.sum(batch.live)
    return jnp.sum(state.emitted) < worth * (rounds - patience)


def start_state(config: DecodeConfig, batch: LaunchInput) -> DecodeState:
    num_rows, vocab_size, n = batch.num_tokens.shape[0], config.target.config.vocab_size, config.variant.logprobs
    counts = None
    if batch.processors is not None:
        counts = processors.output_counts(batch.processors, batch.tokens, batch.num_tokens, vocab_size)
    per_round = jnp.zeros((num_rows, MAX_ROUNDS), jnp.int32)
    return DecodeState(
        tokens=batch.tokens,
        num_tokens=batch.num_tokens,
        draft_len=batch.draft_len,
        finish=jnp.zeros_like(batch.num_tokens),
        round=jnp.int32(0),
        proposed=per_round,
        accepted=per_round,
        emitted=per_round,
        output_counts=counts,
        logprobs=None if n is None else logprobs.empty(num_rows, most_new(config), n),
    )


def most_new(config: DecodeConfig) -> int:
    """Tokens that a row may gain in a launch."""
    return MAX_ROUNDS * (config.num_speculative_tokens + 1)


def result(config: DecodeConfig, batch: LaunchInput, state: DecodeState) -> LaunchResult:
    """The new tokens are read off the history buffer once, at the end."""
    offset = jnp.arange(most_new(config), dtype=jnp.int32)[None, :]
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
        logprobs=state.logprobs,
    )

"""The stages of a round, each as a device program that runs it many times.

Every run of a stage reads the same tokens and positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Float, Int
from jaxspec.decode.loop import begin, start_state
from jaxspec.decode.round import Scores, history_of, propose, score, verify
from jaxspec.decode.state import Context, DecodeConfig, LaunchInput, ModelParams
from jaxspec.drafters.base import History, Proposal
from jaxspec.engine.engine import Engine
from jaxspec.models.paged import PagedModel
from jaxspec.models.rows import Rows
from pallas_kernels.paged_attention import paged_attention

Logits = Float[Array, "*rest"]  # [B,T,V], or [0] for a stage that reads no logits
Result = tuple[Any, PagedKVCache]
Stage = Callable[[Context, PagedKVCache, History, Proposal, Logits], Result]
Carry = tuple[PagedKVCache, Int[Array, ""]]  # the caches, and a number that is always 0
NEVER = 2**30  # larger than any token id, count or logit


def some_proposal(config: DecodeConfig, engine: Engine, inputs: LaunchInput) -> Proposal:
    """Return an arbitrary proposal with the drafter's shapes: every token is 0, every probability equal."""

    def shapes(params: Any, cache: PagedKVCache, inputs: LaunchInput) -> Any:
        context = begin(config, params, inputs)
        return propose(context, cache, history_of(context, start_state(context)))[0]

    shaped = jax.eval_shape(shapes, engine.runner.params, engine.runner.cache, inputs)
    tokens = jnp.zeros_like(shaped.tokens)
    probs = None
    if shaped.probs is not None:
        probs = jnp.full(shaped.probs.shape, 1 / shaped.probs.shape[-1], shaped.probs.dtype)
    return Proposal(tokens, probs, jnp.full_like(shaped.num_proposed, config.num_speculative_tokens))


def propose_once(context: Context, cache: PagedKVCache, history: History, proposal: Proposal, logits: Logits) -> Result:
    """Run the stage propose: the drafter, once."""
    return propose(context, cache, history)


def score_once(context: Context, cache: PagedKVCache, history: History, proposal: Proposal, logits: Logits) -> Result:
    """Run the stage score: the target's pass over the given draft tokens, once."""
    return score(context, cache, history, proposal)


def verify_once(context: Context, cache: PagedKVCache, history: History, proposal: Proposal, logits: Logits) -> Result:
    """Run the stage verify once, with the given logits, although greedy rows would need argmax ids only."""
    return verify(context, history, proposal, Scores(logits, jnp.isfinite(jnp.max(logits, axis=-1)))), cache


# For each stage: the fields of the cache that its function takes and may write, and that function. It returns the
# stage's result and the cache.
STAGES: dict[str, tuple[tuple[str, ...], Stage]] = {
    "propose": (("target", "draft", "features"), propose_once),  # some drafts read the target's keys and values
    "score": (("target", "features"), score_once),
    "verify": ((), verify_once),
}


def repeat(
    config: DecodeConfig,
    once: Stage,
    cache: PagedKVCache,
    num_rounds: Int[Array, ""],
    params: ModelParams,
    inputs: LaunchInput,
    proposal: Proposal,
    logits: Logits,
) -> Carry:
    """Run the stage `once` num_rounds times.

    Each run depends on all results of the run before it, through a number that is always 0. Otherwise the compiler
    would run the stage only once, or leave out unused results.
    """
    context = begin(config, params, inputs)
    start = start_state(context)

    def body(_: Array, carry: Carry) -> Carry:
        cache, zero = carry
        state = dataclasses.replace(start, num_tokens=start.num_tokens + zero)
        result, cache = once(context, cache, history_of(context, state), proposal, logits + zero)
        return cache, always_zero(result)

    ended: Carry = lax.fori_loop(0, num_rounds, body, (cache, jnp.int32(0)))
    return ended


def repeat_attention(
    model: PagedModel,
    cache: PagedKVCache,
    num_rounds: Int[Array, ""],
    inputs: LaunchInput,
    query: Float[Array, "B T H D"],
) -> Carry:
    """Run the attention of all layers num_rounds times. The output of a layer is the query of the next layer.

    All layers must have heads of the same shape.
    """
    c = model.config
    tables = Rows(inputs.num_tokens[:, None], None, inputs.block_table, window_table=inputs.window_table)

    def body(_: Array, carry: Carry) -> Carry:
        cache, zero = carry
        x, kv_len = query, inputs.num_tokens + query.shape[1] - 1 + zero
        paged: Any = cache.target  # each layer's cache, whose `pages` hold keys and values
        for memory, layer in zip(paged, c.cached_layers, strict=True):
            rows = tables.of_layer(layer.window)
            options: dict[str, Any] = {"scale": layer.query_scale, "window": layer.window, "soft_cap": c.soft_cap}
            x = paged_attention(x, memory.pages, rows.block_table, kv_len, **options, **model.backend.how())
        return cache, always_zero(x)

    ended: Carry = lax.fori_loop(0, num_rounds, body, (cache, jnp.int32(0)))
    return ended


def always_zero(tree: Any) -> jax.Array:
    """Return 0 in such a way that the compiler has to compute all arrays of the tree for it."""
    return sum((jnp.any(x > NEVER).astype(jnp.int32) for x in jax.tree.leaves(tree)), start=jnp.int32(0))

"""What changes logits before temperature: allowed ids, bad words, a minimum length, bias, penalties, in vLLM's order.

All of it may depend on history. At offset i of a round history is what is committed plus the round's earlier drafts
x_1..x_i, never the token that is being chosen, and it is the same for the draft's q and the target's p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.shapes import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class FewBiased:
    """A few ids of each row.

    restricted bool[B]: only allowed_ids may be chosen.
    allowed_ids i32[B,_].
    ids i32[B,_]: to whose logits something is added.
    values f32[B,_]: what.
    """

    restricted: jax.Array
    allowed_ids: jax.Array
    ids: jax.Array
    values: jax.Array

    def dense(self, vocab_size: int) -> Float[Array, "B V"]:
        forbidden = jnp.where(self.restricted, -jnp.inf, 0.0)[:, None]
        bias = jnp.broadcast_to(forbidden, (self.restricted.shape[0], vocab_size))
        bias = put(bias, self.allowed_ids).set(0.0, mode="drop")
        return put(bias, self.ids).add(self.values, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Processors:
    """Each row's wishes; ids are padded with -1.

    prompt_len i32[B]: tokens.
    min_len i32[B]: total length below which no stop id is chosen.
    bias: what is added to logits, -inf to those of ids that are not allowed: a few of each row, or dense f32[B,V].
    bad_words i32[B,words,_]: id sequences, aligned to the right.
    repetition f32[B]: 1 is off.
    presence, frequency f32[B]: 0 is off.
    """

    prompt_len: jax.Array
    min_len: jax.Array
    bias: FewBiased | jax.Array
    bad_words: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tables:
    """What is dense, made once a launch.

    bias f32[B,V]: -inf where not allowed.
    in_prompt bool[B,V]: whether the id stands in the prompt.
    """

    bias: jax.Array
    in_prompt: jax.Array


# adjust(logits [B,V], drafts i32[B,K], i) -> logits [B,V] after the first i of the drafts, of each row where it is
# i32[B]; -inf where forbidden.
Adjust = Callable[[Float[Array, "B V"], Int[Array, "B K"], Any], Float[Array, "B V"]]


def tables(processors: Processors, tokens: Int[Array, "B _"], vocab_size: int) -> Tables:
    bias = processors.bias.dense(vocab_size) if isinstance(processors.bias, FewBiased) else processors.bias
    position = jnp.arange(tokens.shape[1])[None, :]
    prompt = jnp.where(position < processors.prompt_len[:, None], tokens, -1)
    in_prompt = put(jnp.zeros((tokens.shape[0], vocab_size), bool), prompt).set(True, mode="drop")
    return Tables(bias, in_prompt)


def output_counts(
    processors: Processors, tokens: Int[Array, "B _"], num_tokens: Int[Array, " B"], vocab_size: int
) -> Int[Array, "B {vocab_size}"]:
    """How often each id stands in the output."""
    position = jnp.arange(tokens.shape[1])[None, :]
    is_output = (position >= processors.prompt_len[:, None]) & (position < num_tokens[:, None])
    return count(jnp.zeros((tokens.shape[0], vocab_size), jnp.int32), jnp.where(is_output, tokens, -1))


def count(counts: Int[Array, "B V"], ids: Int[Array, "B _"]) -> Int[Array, "B V"]:
    """counts with these ids added; -1 is none."""
    return put(counts, ids).add(1, mode="drop")


def put(x: Array, ids: Int[Array, "B _"]):
    """x[b, ids[b]] for an update that drops what is padded: -1 would wrap, V is dropped."""
    return x.at[jnp.arange(x.shape[0])[:, None], jnp.where(ids < 0, x.shape[1], ids)]


def adjuster(
    rows: Processors,
    tables: Tables,
    counts: Int[Array, "B V"],
    tokens: Int[Array, "B _"],
    num_tokens: Int[Array, " B"],
    stop_ids: Int[Array, "B _"],
) -> Adjust:
    """The changes to a round's logits; counts (`output_counts`), tokens and num_tokens at the round's start."""

    def adjust(logits, drafts, i):
        i = jnp.broadcast_to(jnp.asarray(i, jnp.int32), num_tokens.shape)
        too_short = (num_tokens + i < rows.min_len)[:, None]
        completes = completes_bad_word(rows.bad_words, rows.prompt_len, tokens, num_tokens, drafts, i)
        forbidden = [jnp.where(too_short, stop_ids, -1), jnp.where(completes, rows.bad_words[:, :, -1], -1)]
        logits = put(logits, jnp.concatenate(forbidden, axis=1)).set(-jnp.inf, mode="drop") + tables.bias
        now = count(counts, jnp.where(jnp.arange(drafts.shape[1]) < i[:, None], drafts, -1))
        repetition = jnp.where(tables.in_prompt | (now > 0), rows.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
        return logits - now * rows.frequency[:, None] - (now > 0) * rows.presence[:, None]

    return adjust


def completes_bad_word(
    bad_words: Int[Array, "B words _"],
    prompt_len: Int[Array, " B"],
    tokens: Int[Array, "B _"],
    num_tokens: Int[Array, " B"],
    drafts: Int[Array, "B K"],
    i: Int[Array, " B"],
) -> Bool[Array, "B words"]:
    """Whether the output so far, the first i drafts included, ends with all but the last id of a bad word. The prompt
    takes no part."""
    length = bad_words.shape[2] - 1
    at = num_tokens[:, None] + jnp.arange(-length, 0)
    recent = jnp.concatenate([jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1), drafts], axis=1)
    recent = jnp.take_along_axis(recent, i[:, None] + jnp.arange(length), axis=1)
    at += i[:, None]
    before = bad_words[:, :, :-1]
    same = (before == recent[:, None]) & (at >= prompt_len[:, None])[:, None]
    return (bad_words[:, :, -1] >= 0) & jnp.all((before < 0) | same, axis=2)

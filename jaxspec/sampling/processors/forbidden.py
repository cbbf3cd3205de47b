"""Ids that are forbidden for one token: stop ids while the output is shorter than min_tokens, and ends of bad words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.sampling.arrays import filled
from jaxspec.sampling.processors.base import Place, Processor, put


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Forbidden(Processor):
    """The processor that sets the logits of forbidden ids to -inf.

    Stop ids are forbidden while the text is too short. The last id of a bad word is forbidden after its other ids.

    min_len i32[B]: length of prompt and output below which stop ids are forbidden.
    bad_words i32[B,words,_]: id sequences of the bad words, aligned to the right and padded with -1.
    """

    min_len: jax.Array
    bad_words: jax.Array

    @classmethod
    def of_requests(cls, requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> Forbidden:
        min_len = [min(len(r.prompt) + r.params.min_tokens, r.max_len) for r in requests]
        words = aligned_right([r.bad_words for r in requests], (rows, *room.bad_words))
        return cls(filled(rows, min_len, np.int32), words)

    def apply(self, tables: Any, state: Any, logits: Float[Array, "B V"], place: Place) -> Float[Array, "B V"]:
        text = place.text
        too_short = (text.num_tokens + place.i < self.min_len)[:, None]
        completes = completes_bad_word(self.bad_words, text.prompt_len, text.tokens, text.num_tokens, place)
        ids = [jnp.where(too_short, text.stop_ids, -1), jnp.where(completes, self.bad_words[:, :, -1], -1)]
        result: Float[Array, "B V"] = put(logits, jnp.concatenate(ids, axis=1)).set(-jnp.inf, mode="drop")
        return result


def aligned_right(words: Sequence[Sequence[Sequence[int]]], shape: tuple[int, int, int]) -> Any:
    """Return each row's id sequences as an array [rows, words, length], with -1 before the shorter sequences."""
    array = np.full(shape, -1, np.int32)
    for row, listed in enumerate(words):
        for i, word in enumerate(listed):
            array[row, i, shape[-1] - len(word) :] = word
    return array


def completes_bad_word(
    bad_words: Int[Array, "B words _"],
    prompt_len: Int[Array, " B"],
    tokens: Int[Array, "B _"],
    num_tokens: Int[Array, " B"],
    place: Place,
) -> Bool[Array, "B words"]:
    """Return for each bad word whether the output before a place ends with all ids of the word but the last.

    The output includes the draft tokens before the place. Ids of the prompt do not count.

    bad_words: id sequences, aligned to the right and padded with -1.
    prompt_len, tokens, num_tokens: committed text as in `Text`.
    """
    length = bad_words.shape[2] - 1
    i = place.i[:, None]
    at = num_tokens[:, None] + jnp.arange(-length, 0)
    recent = jnp.concatenate([jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1), place.drafts], axis=1)
    recent = jnp.take_along_axis(recent, i + jnp.arange(length), axis=1)
    before = bad_words[:, :, :-1]
    same = (before == recent[:, None]) & (at + i >= prompt_len[:, None])[:, None]
    return (bad_words[:, :, -1] >= 0) & jnp.all((before < 0) | same, axis=2)

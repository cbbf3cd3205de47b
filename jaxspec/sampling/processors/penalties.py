"""Penalties for ids that have occurred: repetition (in prompt or output), presence and frequency (in the output)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.sampling.arrays import filled
from jaxspec.sampling.processors.base import Place, Processor, Text, put


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Penalties(Processor):
    """The processor that applies each row's penalties.

    repetition f32[B]: repetition penalty; 1 is off.
    presence, frequency f32[B]: presence and frequency penalty; 0 is off.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array

    @classmethod
    def of_requests(cls, requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> Penalties:
        params = [r.params for r in requests]
        return cls(
            repetition=filled(rows, [p.repetition_penalty for p in params], np.float32, 1.0),
            presence=filled(rows, [p.presence_penalty for p in params], np.float32),
            frequency=filled(rows, [p.frequency_penalty for p in params], np.float32),
        )

    def tables(self, text: Text, pool: jax.Array | None) -> Bool[Array, "B V"]:
        """Return for each id of the vocabulary whether the id occurs in the prompt."""
        position = jnp.arange(text.tokens.shape[1])[None, :]
        prompt = jnp.where(position < text.prompt_len[:, None], text.tokens, -1)
        result: Bool[Array, "B V"] = put(jnp.zeros((len(text.tokens), text.vocab_size), bool), prompt).set(
            True, mode="drop"
        )
        return result

    def init(self, text: Text) -> Int[Array, "B V"]:
        """Return the number of times that each id of the vocabulary occurs in the output."""
        position = jnp.arange(text.tokens.shape[1])[None, :]
        is_output = (position >= text.prompt_len[:, None]) & (position < text.num_tokens[:, None])
        none = jnp.zeros((len(text.tokens), text.vocab_size), jnp.int32)
        return count(none, jnp.where(is_output, text.tokens, -1))

    def apply(self, tables: Any, state: Any, logits: Float[Array, "B V"], place: Place) -> Float[Array, "B V"]:
        drafted = jnp.arange(place.drafts.shape[1]) < place.i[:, None]
        now = count(state, jnp.where(drafted, place.drafts, -1))
        repetition = jnp.where(tables | (now > 0), self.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
        return logits - now * self.frequency[:, None] - (now > 0) * self.presence[:, None]

    def advance(self, tables: Any, state: Any, emitted: Int[Array, "B _"]) -> Any:
        return count(state, emitted)


def count(counts: Int[Array, "B V"], ids: Int[Array, "B _"]) -> Int[Array, "B V"]:
    """Return the counts of ids after adding one for each of `ids`. The padding -1 is not counted."""
    result: Int[Array, "B V"] = put(counts, ids).add(1, mode="drop")
    return result

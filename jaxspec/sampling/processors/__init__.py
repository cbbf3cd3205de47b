"""Processors shape logits before temperature, in vLLM's order: forbidden ids, bias, penalties. A file each.

A new one is a file with a class derived from `Processor`, and a line in PROCESSORS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxspec.common.shapes import Array, Int
from jaxspec.sampling.processors.base import Adjust, Place, Processor, Text
from jaxspec.sampling.processors.bias import Bias
from jaxspec.sampling.processors.forbidden import Forbidden
from jaxspec.sampling.processors.penalties import Penalties

# In the order in which they are applied.
PROCESSORS: dict[str, type[Processor]] = {"forbidden": Forbidden, "bias": Bias, "penalties": Penalties}
Processors = Mapping[str, Processor]  # by name; empty where no row asks for any


def of_requests(requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> dict[str, Processor]:
    """Pack the parameters of requests. room: how many ids a row may list, see `engine.batch.Room`."""
    return {name: kind.of_requests(requests, rows, room, vocab_size) for name, kind in PROCESSORS.items()}


def tables(processors: Processors, text: Text) -> dict[str, Any]:
    """Compute what is constant during a launch."""
    return {name: processor.tables(text) for name, processor in processors.items()}


def init(processors: Processors, text: Text) -> dict[str, Any]:
    """Compute the states that belong to the committed text."""
    return {name: processor.init(text) for name, processor in processors.items()}


def adjuster(processors: Processors, tables: Mapping[str, Any], states: Mapping[str, Any], text: Text) -> Adjust | None:
    """Return the changes to a round's logits; None where no row asks for any. text, states: as the round begins."""
    if not processors:
        return None

    def adjust(logits, drafts, i):
        place = Place(text, drafts, jnp.broadcast_to(jnp.asarray(i, jnp.int32), text.num_tokens.shape))
        for name in PROCESSORS:
            if name in processors:
                logits = processors[name].apply(tables[name], states[name], logits, place)
        return logits

    return adjust


def advance(processors: Processors, states: Mapping[str, Any], emitted: Int[Array, "B _"]) -> dict[str, Any]:
    """Return the states after a round's committed tokens, padded with -1."""
    return {name: processor.advance(states[name], emitted) for name, processor in processors.items()}

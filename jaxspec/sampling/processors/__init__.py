"""Logits processors: changes of logits before temperature, in vLLM's order (grammar, forbidden ids, bias, penalties).

A processor is a file with a class derived from `Processor`, and a line in PROCESSORS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.sampling.processors.base import Adjust, Place, Processor, Text
from jaxspec.sampling.processors.bias import Bias
from jaxspec.sampling.processors.forbidden import Forbidden
from jaxspec.sampling.processors.grammar import Grammar
from jaxspec.sampling.processors.penalties import Penalties

# Processors by name, in the order in which they are applied.
PROCESSORS: dict[str, type[Processor]] = {
    "grammar": Grammar,
    "forbidden": Forbidden,
    "bias": Bias,
    "penalties": Penalties,
}
Processors = Mapping[str, Processor]  # processors of a batch by name; empty if no row of the batch uses any


def of_requests(
    names: Collection[str], requests: Sequence[Any], rows: int, room: Any, vocab_size: int
) -> dict[str, Processor]:
    """Pack the parameters of a batch's requests into processors.

    names: names of the processors that the program has.
    rows: number of rows of the batch.
    room: largest numbers of biased ids and of bad words that a row may list (`engine.batch.Room`).
    """
    return {name: PROCESSORS[name].of_requests(requests, rows, room, vocab_size) for name in names}


def tables(processors: Processors, text: Text, pool: jax.Array | None = None) -> dict[str, Any]:
    """Compute the arrays of each processor that are constant during a launch (one run of the decoding program).

    pool: the device's tables of grammars; None if no row has a grammar.
    """
    return {name: processor.tables(text, pool) for name, processor in processors.items()}


def init(processors: Processors, text: Text) -> dict[str, Any]:
    """Compute each processor's state after the committed text, at the start of a launch."""
    return {name: processor.init(text) for name, processor in processors.items()}


def adjuster(processors: Processors, tables: Mapping[str, Any], states: Mapping[str, Any], text: Text) -> Adjust | None:
    """Return the function that changes the logits of a round (see `Adjust`), or None if no row uses a processor.

    tables: result of the function `tables`.
    states: states of the processors at the start of the round.
    text: committed text at the start of the round.
    """
    if not processors:
        return None

    def adjust(logits: Float[Array, "B V"], drafts: Int[Array, "B K"], i: Any) -> Float[Array, "B V"]:
        place = Place(text, drafts, jnp.broadcast_to(jnp.asarray(i, jnp.int32), text.num_tokens.shape))
        for name in PROCESSORS:
            if name in processors:
                logits = processors[name].apply(tables[name], states[name], logits, place)
        return logits

    return adjust


def advance(
    processors: Processors, tables: Mapping[str, Any], states: Mapping[str, Any], emitted: Int[Array, "B _"]
) -> dict[str, Any]:
    """Return each processor's state after a round. emitted: the round's committed tokens, padded with -1."""
    return {name: processor.advance(tables[name], states[name], emitted) for name, processor in processors.items()}

"""The base class of logits processors, and the types that they share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int

# A function adjust(logits [B,V], drafts i32[B,K], i) returns the changed logits [B,V] of the token after the first i
# draft tokens, with -inf for forbidden ids. i is an integer, or i32[B] with one value per row.
Adjust = Callable[[Float[Array, "B V"], Int[Array, "B K"], Any], Float[Array, "B V"]]


@dataclasses.dataclass(frozen=True)
class Text:
    """The committed text of all rows: the prompt and the tokens that were emitted.

    tokens i32[B,_]: tokens of prompt and output.
    num_tokens i32[B]: number of tokens of prompt and output.
    prompt_len i32[B]: number of tokens of the prompt.
    stop_ids i32[B,_]: ids that end a row, padded with -1.
    vocab_size: size V of the vocabulary.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    prompt_len: jax.Array
    stop_ids: jax.Array
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a token in a round: after the committed text and the first i draft tokens.

    text: committed text at the start of the round.
    drafts i32[B,K]: draft tokens of the round.
    i i32[B]: number of draft tokens before the token.
    """

    text: Text
    drafts: jax.Array
    i: jax.Array


class Processor(abc.ABC):
    """Base class of logits processors. An object holds the rows' parameters, as a pytree of arrays with a row axis.

    A processor's change of the logits may depend on the committed text and on the draft tokens before the token that is
    sampled, but not on the sampled token. The change applies to the draft's distribution q and to
    the target's distribution p alike.
    """

    @classmethod
    @abc.abstractmethod
    def of_requests(cls, requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> Processor:
        """Pack the parameters of a batch's requests into numpy arrays. Rows without a request change no logits.

        rows: number of rows.
        room: largest numbers of biased ids and of bad words that a row may list (`engine.batch.Room`).
        """

    def tables(self, text: Text, pool: jax.Array | None) -> Any:
        """Return arrays that are computed once for a launch (one run of the decoding program, with many rounds).

        pool: the device's tables of grammars (`grammar.py`); None if no row has a grammar.
        """
        return None

    def init(self, text: Text) -> Any:
        """Return the state at the start of a launch, after the committed text: a pytree of arrays with a row axis."""
        return None

    @abc.abstractmethod
    def apply(self, tables: Any, state: Any, logits: Float[Array, "B V"], place: Place) -> Float[Array, "B V"]:
        """Return the changed logits of the token at this place, with -inf for forbidden ids.

        tables: result of the method `tables`.
        state: state at the start of the round.
        """

    def advance(self, tables: Any, state: Any, emitted: Int[Array, "B _"]) -> Any:
        """Return the state after a round. emitted: the round's committed tokens, padded with -1."""
        return state


def put(x: Array, ids: Int[Array, "B _"]) -> Any:
    """Return x.at[b, ids[b]] for each row b, for an update with mode="drop".

    The padding -1 is replaced by V, which mode="drop" ignores. A negative index would count from the end.
    """
    return x.at[jnp.arange(x.shape[0])[:, None], jnp.where(ids < 0, x.shape[1], ids)]

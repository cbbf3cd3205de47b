"""The protocol of a processor, and what processors have in common."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.common.shapes import Array, Float, Int

# adjust(logits [B,V], drafts i32[B,K], i) -> logits [B,V] after the first i of the drafts, of each row where it is
# i32[B]; -inf where forbidden.
Adjust = Callable[[Float[Array, "B V"], Int[Array, "B K"], Any], Float[Array, "B V"]]


@dataclasses.dataclass(frozen=True)
class Text:
    """The committed text of all rows.

    tokens i32[B,_]: prompt and output.
    num_tokens i32[B]: how many they are.
    prompt_len i32[B]: how many are the prompt's.
    stop_ids i32[B,_]: ids that end a row, padded with -1.
    vocab_size: V.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    prompt_len: jax.Array
    stop_ids: jax.Array
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a round's token.

    text: as the round began.
    drafts i32[B,K]: of the round.
    i i32[B]: how many of the drafts stand before this token.
    """

    text: Text
    drafts: jax.Array
    i: jax.Array


class Processor(abc.ABC):
    """One way to shape the distributions of rows: the rows' parameters, as a pytree of arrays with a row axis.

    Whatever it does may depend on the committed text and on the drafts before the token that is being chosen, never on
    that token. It is the same for the draft's q and the target's p.
    """

    @classmethod
    @abc.abstractmethod
    def of_requests(cls, requests: Sequence[Any], rows: int, room: Any, vocab_size: int) -> Processor:
        """Pack the parameters of requests into numpy arrays; rows beyond the requests ask for nothing."""

    def tables(self, text: Text) -> Any:
        """Return what is constant during a launch and costs something to compute, once a launch."""
        return None

    def init(self, text: Text) -> Any:
        """Return the state that belongs to the committed text, once a launch: a pytree of arrays with a row axis."""
        return None

    @abc.abstractmethod
    def apply(self, tables: Any, state: Any, logits: Float[Array, "B V"], place: Place) -> Float[Array, "B V"]:
        """Return the logits of this place, -inf where forbidden. state: as the round began."""

    def advance(self, state: Any, emitted: Int[Array, "B _"]) -> Any:
        """Return the state after a round's committed tokens, padded with -1."""
        return state


def put(x: Array, ids: Int[Array, "B _"]):
    """Return x.at[b, ids[b]] for an update that drops what is padded: -1 would wrap, V is dropped."""
    return x.at[jnp.arange(x.shape[0])[:, None], jnp.where(ids < 0, x.shape[1], ids)]

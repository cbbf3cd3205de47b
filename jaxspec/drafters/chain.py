"""Chains of drafts: each step reads the token that the previous step chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.base import Choose
from jaxspec.models.head import Head


class Step(NamedTuple):
    """The output of a draft pass.

    head: the `Head` of the next draft's logits, or an object with its methods.
    hidden [B,E]: the head's input.
    state: the input of the next step.
    """

    head: Any
    hidden: Float[Array, "B _"]
    state: Any


def chain(
    count: int,
    first: Step,
    step: Callable[[Any, Int[Array, " B"], Any], Step],
    choose: Choose,
    is_cheap: Callable[[], bool] | None = None,
) -> tuple[Int[Array, "B K"], Any, Any]:
    """Choose K = count drafts, one after the other.

    Args:
      count: K.
      first: the output of the first pass, from which draft 0 is chosen.
      step: step(state, token, i) runs the pass that chooses draft i, counted from 1. token: draft i - 1.
      choose: the round's `Choose`.
      is_cheap: whether a step costs less than an iteration of a loop. Called after draft 0 is chosen.

    Returns:
      The drafts, their distributions (None where no rule needs them), and the last state.
    """
    drafts = jnp.zeros((first.hidden.shape[0], count), jnp.int32)
    chosen = choose(first.head, first.hidden, drafts, 0)
    room = jax.tree.map(lambda x: jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype), chosen)

    def put(i, drawn, chosen):
        return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, i, axis=1), drawn, chosen)

    def one_more(i, carry):
        state, drawn = carry
        previous = lax.dynamic_index_in_dim(drawn[0], i - 1, axis=1, keepdims=False)
        head, hidden, state = step(state, previous, i)
        return state, put(i, drawn, choose(head, hidden, drawn[0], i))

    # The loop compiles all steps but the first once. Steps that cost less than an iteration are unrolled.
    start = first.state, put(0, room, chosen)
    unroll = True if is_cheap is not None and is_cheap() else None
    state, (drafts, probs) = lax.fori_loop(1, count, one_more, start, unroll=unroll)
    return drafts, probs, state


class Place:
    """The head at one place of a pass that computed all K places at once.

    Logits and argmax tokens are computed for all places at the first request, and kept in `known`.
    """

    def __init__(self, head: Head, hidden: Float[Array, "B K _"], known: dict[Any, Any], i: Any) -> None:
        self.head, self.hidden, self.known, self.i = head, hidden, known, i

    @property
    def vocabulary(self) -> Any:
        return self.head.vocabulary

    def logits(self, x: Any, backend: Any) -> Any:
        return self.at_place("logits", lambda: self.head.logits(self.hidden, backend))

    def argmax_token(self, x: Any, backend: Any, vocab_size: int | None = None) -> Any:
        return self.at_place("argmax_token", lambda: self.head.argmax_token(self.hidden, backend, vocab_size))

    def at_place(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return this place's part of a result of the head for all places. Compute the result if it is not known."""
        if name not in self.known:
            self.known[name] = compute()
        return lax.dynamic_index_in_dim(self.known[name], self.i, axis=1, keepdims=False)


def at_once(head: Head, hidden: Float[Array, "B K _"], choose: Choose) -> tuple[Int[Array, "B K"], Any]:
    """Choose all K drafts from the hidden states of one pass. Return the drafts and their distributions, as `chain`."""
    known: dict[Any, Any] = {}

    def step(state, token, i):
        here = lax.dynamic_index_in_dim(hidden, i, axis=1, keepdims=False)
        return Step(Place(head, hidden, known, i), here, ())

    def only_argmax():  # then a step looks up one token
        return "logits" not in known

    drafts, probs, _ = chain(hidden.shape[1], step((), None, 0), step, choose, only_argmax)
    return drafts, probs

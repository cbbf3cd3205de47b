"""Chains of draft tokens, from one pass a token (`chain`) or from one pass for all tokens (`at_once`)."""

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
    """The output of one pass of a draft.

    head: the `Head` that computes the next draft's logits, or an object with its methods.
    hidden [B,E]: hidden states from which the head computes the logits.
    state: state that the next step reads, for example the pages of the draft's KV cache.
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
    """Choose K = count draft tokens, one after the other.

    Args:
      count: K, the number of drafts.
      first: the output of the first pass, from which draft 0 is chosen.
      step: function step(state, token, i) that runs the pass from which draft i is chosen; i counts from 1. token:
        draft i - 1.
      choose: the round's `Choose`, which samples a draft.
      is_cheap: function that returns whether a step costs less than the overhead of a loop's iteration. It is called
        after draft 0 is chosen.

    Returns:
      The drafts, their distributions (None if `choose` returns none), and the last step's state.
    """
    drafts = jnp.zeros((first.hidden.shape[0], count), jnp.int32)
    chosen = choose(first.head, first.hidden, drafts, 0)
    room = jax.tree.map(lambda x: jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype), chosen)

    def put(i: Any, drawn: Any, chosen: Any) -> Any:
        return jax.tree.map(lambda x, one: lax.dynamic_update_index_in_dim(x, one, i, axis=1), drawn, chosen)

    def one_more(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, drawn = carry
        previous = lax.dynamic_index_in_dim(drawn[0], i - 1, axis=1, keepdims=False)
        head, hidden, state = step(state, previous, i)
        return state, put(i, drawn, choose(head, hidden, drawn[0], i))

    # A loop compiles the step only once. Steps that cost less than an iteration's overhead are unrolled.
    start = first.state, put(0, room, chosen)
    unroll = True if is_cheap is not None and is_cheap() else None
    state, (drafts, probs) = lax.fori_loop(1, count, one_more, start, unroll=unroll)
    return drafts, probs, state


class Place:
    """The output head for one of K drafts whose hidden states were all computed in one pass.

    The first call of `logits` or `argmax_token` computes the result for all K drafts. It is stored in `known`, which
    the objects of all K drafts share.

    head: the output head.
    hidden [B,K,E]: hidden states of the K drafts.
    known: results of the output head so far, by method name.
    i: index of this draft.
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
        """Return draft i's part of a result of the output head for all K drafts.

        name: name of the result in `known`.
        compute: function that computes the result; it is called if `known` lacks the result.
        """
        if name not in self.known:
            self.known[name] = compute()
        return lax.dynamic_index_in_dim(self.known[name], self.i, axis=1, keepdims=False)


def at_once(head: Head, hidden: Float[Array, "B K _"], choose: Choose) -> tuple[Int[Array, "B K"], Any]:
    """Choose all K drafts from the hidden states of one pass. Return the drafts and their distributions."""
    known: dict[Any, Any] = {}

    def step(state: Any, token: Any, i: Any) -> Step:
        here = lax.dynamic_index_in_dim(hidden, i, axis=1, keepdims=False)
        return Step(Place(head, hidden, known, i), here, ())

    def only_argmax() -> bool:  # True if a step only looks up its argmax token
        return "logits" not in known

    drafts, probs, _ = chain(hidden.shape[1], step((), None, 0), step, choose, only_argmax)
    return drafts, probs

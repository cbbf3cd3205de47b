"""Draft after draft: each step reads the token that the one before it chose."""

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
    """What a draft pass gives: the head and what it reads [B,E], of which the next draft is chosen, and what the next
    step goes on from."""

    head: Any  # a Head, or what has its methods
    hidden: Float[Array, "B _"]
    state: Any


def chain(
    count: int,
    first: Step,
    step: Callable[[Any, Int[Array, " B"], Any], Step],
    choose: Choose,
    small: Callable[[], bool] = lambda: False,
) -> tuple[Int[Array, "B K"], Any, Any]:
    """K = count drafts, what `choose` gives beside each (its distribution, where a rule needs that), the last state.
    step(state, token, i): the pass that reads draft i, counted from 1. small: whether a step is next to nothing, as the
    first has shown."""
    drafts = jnp.zeros((first.hidden.shape[0], count), jnp.int32)
    chosen = choose(first.head, first.hidden, drafts, 0)
    room = jax.tree.map(lambda x: jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype), chosen)
    put = lambda i, drawn, chosen: jax.tree.map(
        lambda x, one: lax.dynamic_update_index_in_dim(x, one, i, axis=1), drawn, chosen
    )

    def one_more(i, carry):
        state, drawn = carry
        head, hidden, state = step(state, lax.dynamic_index_in_dim(drawn[0], i - 1, axis=1, keepdims=False), i)
        return state, put(i, drawn, choose(head, hidden, drawn[0], i))

    # A loop, so that all but the first are compiled once; where each would do less than a loop costs, none.
    start = first.state, put(0, room, chosen)
    state, (drafts, probs) = lax.fori_loop(1, count, one_more, start, unroll=small() or None)
    return drafts, probs, state


class Place:
    """One place of a pass that gave all of them at once: whichever is asked for, it is computed for all, once."""

    def __init__(self, head: Head, hidden: Float[Array, "B K _"], known: dict[Any, Any], i: Any) -> None:
        self.head, self.hidden, self.known, self.i = head, hidden, known, i

    @property
    def vocabulary(self) -> Any:
        return self.head.vocabulary

    def logits(self, x: Any, backend: Any) -> Any:
        return self.here("logits", lambda: self.head.logits(self.hidden, backend))

    def likeliest(self, x: Any, backend: Any, vocab_size: int | None = None) -> Any:
        return self.here("likeliest", lambda: self.head.likeliest(self.hidden, backend, vocab_size))

    def here(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self.known:
            self.known[name] = compute()
        return lax.dynamic_index_in_dim(self.known[name], self.i, axis=1, keepdims=False)


def at_once(head: Head, hidden: Float[Array, "B K _"], choose: Choose) -> tuple[Int[Array, "B K"], Any]:
    """As `chain`, of a pass that has said something of all K places."""
    known: dict[Any, Any] = {}
    at = lambda i: lax.dynamic_index_in_dim(hidden, i, axis=1, keepdims=False)
    step = lambda state, token, i: Step(Place(head, hidden, known, i), at(i), ())
    only_looked_up = lambda: "logits" not in known
    drafts, probs, _ = chain(hidden.shape[1], step((), None, 0), step, choose, only_looked_up)
    return drafts, probs

"""A drafter given as an object: its proposals are verified as any other's, and what is none is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.common.errors import UserError
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from tests.support import lively_models, tiny_models
from tests.support.sizes import cases

K = 4
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 3}


@dataclasses.dataclass(frozen=True)
class Again(Drafter):
    """Proposes the last token again and again."""

    def propose(self, params, cache, history, choose):
        last = jnp.take_along_axis(history.tokens, history.num_tokens[:, None] - 1, axis=1)
        tokens = jnp.repeat(last, self.num_speculative_tokens, axis=1)
        return Proposal(tokens, None, jnp.where(history.live, history.num_wanted, 0)), cache.draft


@dataclasses.dataclass(frozen=True)
class Bigrams(Drafter):
    """Draws each token from a table of its own."""

    vocab_size: int

    def parameters(self) -> Any:
        return jnp.eye(self.vocab_size)[:, ::-1] * 3.0

    def propose(self, params, cache, history, choose):
        token = jnp.take_along_axis(history.tokens, history.num_tokens[:, None] - 1, axis=1)[:, 0]
        drafts = jnp.zeros((len(token), self.num_speculative_tokens), jnp.int32)
        probs = []
        for i in range(self.num_speculative_tokens):
            token, q = choose(Table(params["draft"]), jnp.take(params["draft"], token, axis=0), drafts, i)
            drafts = drafts.at[:, i].set(token)
            probs.append(q)
        together = None if probs[0] is None else jnp.stack(probs, axis=1)
        return Proposal(drafts, together, jnp.where(history.live, history.num_wanted, 0)), cache.draft


class Table:
    vocabulary = None

    def __init__(self, table) -> None:
        self.table = table

    def logits(self, hidden, backend):
        return hidden

    def argmax_token(self, hidden, backend, vocab_size):
        return jnp.argmax(hidden, axis=-1)


def outputs(drafter: Drafter | None, **sampling: Any) -> tuple[list[list[int]], int]:
    spec = None if drafter is None else {"drafter": drafter, "adaptive": False}
    engine = tiny_models.engine(lively_models.target(), spec, **lively_models.OPTIONS)
    params = [SamplingParams(max_tokens=20, **sampling)] * 4
    requests = tiny_models.run(engine, lively_models.PROMPTS[:4], params)
    return [r.output for r in requests], engine.metrics.num_draft_tokens


@cases("sampling", [GREEDY, SEEDED], quick=[SEEDED], ids=str)
@cases("kind", ["again", "bigrams"], quick=["bigrams"])
def test_it_changes_no_token(kind, sampling):
    drafter = Again(K) if kind == "again" else Bigrams(K, lively_models.target().config.vocab_size)
    found, num_drafts = outputs(drafter, **sampling)
    assert found == outputs(None, **sampling)[0]
    assert num_drafts > 0


def test_it_says_how_many_drafts_there_are():
    assert SpeculativeConfig(drafter=Again(3)).num_speculative_tokens == 3
    assert SpeculativeConfig(drafter=Again(3)).method is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": Again(2), "method": "ngram"}, "drafter is given, and method='ngram': drop one"),
        ({"drafter": Again(2), "model": "x"}, "drafter is given, and model='x': drop one"),
        ({"drafter": Again(2), "tree_width": 2}, "drafter is given, and tree_width=2"),
        ({"drafter": Again(2), "num_speculative_tokens": 3}, "num_speculative_tokens=3, but the drafter has 2"),
        ({"drafter": "ngram"}, "num_speculative_tokens of the drafter=None must be a whole number"),
        ({"drafter": Again(0)}, "num_speculative_tokens of the drafter=0 is below 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        SpeculativeConfig(**options)


@dataclasses.dataclass(frozen=True)
class Unhashable(Again):
    table: Any = dataclasses.field(default_factory=list)


class Looks:
    num_speculative_tokens = 2


@pytest.mark.parametrize(
    ("drafter", "message"),
    [(Looks(), "must be a jaxspec.drafters.base.Drafter"), (Unhashable(2), "a frozen dataclass")],
)
def test_what_is_no_drafter_is_refused_by_the_engine(drafter, message):
    with pytest.raises(UserError, match=message):
        tiny_models.engine(lively_models.target(), {"drafter": drafter}, **lively_models.OPTIONS)

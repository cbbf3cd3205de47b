"""Logits that are no numbers end the row they belong to, and no other; a draft's cost it its drafts, and no token."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from jaxspec.engine.engine import Engine
from jaxspec.engine.results import NOT_FINITE_MESSAGE
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from tests.support import tiny_models
from tests.support.sizes import cases

POISON = 7  # an id whose row of the table is no number
CONFIG = dataclasses.replace(tiny_models.FAMILIES["llama3"], max_model_len=128)  # with a head of its own
PROMPTS = ([1, 2, 3, 4, 2, 3], [5, POISON, 9, 5], list(range(10, 30)), [40, 41, 42, 40, 41])
HOW = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.9, "seed": 4, "top_k": 9, "logprobs": 2},
    "processed": {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 2},
}


@functools.cache
def poisoned(seed: int = 0) -> Model:
    model = tiny_models.model(CONFIG, seed)
    return Model(CONFIG, model.params | {"embed": model.params["embed"].at[POISON].set(jnp.nan)})


@functools.cache
def served(method: str, which: str = "target") -> Engine:
    """POISON is poison to the target, or to its draft alone."""
    options = {"max_num_seqs": 4, "num_pages": 64}
    target = poisoned() if which == "target" else tiny_models.model(CONFIG)
    if method == "plain":
        return tiny_models.engine(target, **options)
    speculative = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    if method == "ngram":
        return tiny_models.engine(target, speculative, **options)
    return tiny_models.engine(target, speculative | {"model": "x"}, poisoned(), **options)


def sampling(how: str) -> SamplingParams:
    return SamplingParams(max_tokens=12, allowed_token_ids=[i for i in range(64) if i != POISON], **HOW[how])


def plainly(how: str) -> SamplingParams:
    """Without what makes the id impossible, for programs that look at no logits: POISON may be said, and ends it."""
    return SamplingParams(max_tokens=12, **HOW[how])


@cases("make", [sampling, plainly], quick=[sampling])
@cases("how", HOW, quick=["greedy"])
@cases("method", ["plain", "ngram", "draft_model", "ngram+draft_model"], quick=["draft_model"])
def test_a_row_without_a_law_ends_alone(method, how, make):
    requests = tiny_models.run(served(method), PROMPTS, make(how))
    expected = tiny_models.run(served("plain", "nobody"), PROMPTS, make(how))
    assert (requests[1].finish_reason, requests[1].error) == ("error", NOT_FINITE_MESSAGE)
    assert requests[1].output == []
    for i in (0, 2, 3):
        known = expected[i].output
        if POISON in known:
            known = known[: known.index(POISON) + 1]
            assert (requests[i].finish_reason, requests[i].error) == ("error", NOT_FINITE_MESSAGE)
        else:
            assert (requests[i].finish_reason, requests[i].error) == ("length", None)
        assert requests[i].output == known


@cases("how", HOW, quick=["greedy"])
@cases("method", ["draft_model", "ngram+draft_model"], quick=["draft_model"])
def test_a_draft_without_a_law_proposes_nothing_of_worth(method, how):
    engine = served(method, "draft")
    requests = tiny_models.run(engine, PROMPTS, plainly(how))
    assert [r.output for r in requests] == tiny_models.outputs(served("plain", "nobody"), PROMPTS, plainly(how))
    if how == "greedy":
        assert requests[0].metrics.num_draft_tokens > 0


@cases("rule", ["standard", "block"], quick=["standard"])
def test_a_draft_without_a_law_under_a_rule_that_looks_at_it(rule):
    """Nothing is proposed where q is no number, and every token has the target's law: here that of a single id."""
    speculative = {"model": "x", "num_speculative_tokens": 3, "rejection_sample_method": rule}
    engine = tiny_models.engine(tiny_models.model(CONFIG), speculative, poisoned(), max_num_seqs=4, num_pages=64)
    asked = [SamplingParams(max_tokens=6, logit_bias={20 + i: 100.0}) for i in range(4)]
    requests = tiny_models.run(engine, PROMPTS, asked)
    assert [r.output for r in requests] == [[20 + i] * 6 for i in range(4)]
    assert requests[1].metrics.num_draft_tokens == 0
    assert requests[0].metrics.num_draft_tokens > 0


def test_a_draft_that_spoils_its_round_costs_a_round_and_no_token():
    """Drafts that are poison to the target, which would never say them: their row goes on as it does without."""
    target = poisoned()
    params = dict(tiny_models.model(CONFIG).params)
    params["head"] = params["head"].at[:, POISON].set(50.0 * params["head"][:, 0])  # says POISON now and then
    draft = Model(CONFIG, params)
    engine = tiny_models.engine(
        target, {"model": "x", "num_speculative_tokens": 3}, draft, max_num_seqs=4, num_pages=64
    )
    prompts, asked = [PROMPTS[0], PROMPTS[2], PROMPTS[3]], SamplingParams(max_tokens=24, temperature=0.0)
    requests, expected = tiny_models.run(engine, prompts, asked), tiny_models.run(served("plain"), prompts, asked)
    assert [(r.output, r.finish_reason) for r in requests] == [(r.output, r.finish_reason) for r in expected]
    assert any(r.finish_reason == "length" for r in requests)

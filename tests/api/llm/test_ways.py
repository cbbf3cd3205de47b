"""Ways of speculating: switched off, by n-grams, over shared weights, in one call."""

from __future__ import annotations

import jax

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from tests.api.llm.answers import GREEDY, PROMPTS, ids_of


def test_another_way_of_speculating_shares_the_weights(llm, folder):
    other = llm.speculating({"method": "ngram", "num_speculative_tokens": 2})
    mine, theirs = llm.engine.runner.params["target"], other.engine.runner.params["target"]
    assert all(a is b for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True))
    assert (llm.engine.num_drafts, other.engine.num_drafts) == (3, 2)
    before = llm.metrics.num_emitted_tokens
    found = other.generate(PROMPTS[:2], GREEDY, progress=False)
    assert llm.metrics.num_emitted_tokens == before
    assert other.metrics.num_emitted_tokens == 48
    assert list(map(ids_of, found)) == list(map(ids_of, llm.generate(PROMPTS[:2], GREEDY, progress=False)))
    other.observers.append(print)
    assert not llm.observers
    assert llm.speculating(None).engine.num_drafts == 0


def test_per_prompt_params_and_the_off_switch(llm):
    """Greedy, seeded, and plain by num_speculative_tokens=0, in one batch: each equals its own run alone."""
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, num_speculative_tokens=0),
    ]
    together = llm.generate([PROMPTS[0]] * 3, params)
    assert [ids_of(o) for o in together] == [ids_of(llm.generate([PROMPTS[0]] * 2, p)[0]) for p in params]
    assert ids_of(together[0]) == ids_of(together[2])
    assert together[2].metrics.num_drafts == 0
    assert together[2].metrics.mean_acceptance_length == 1.0


def test_ngram_equals_plain(folder):
    """With a config object in place of the dict."""
    ngram = LLM(str(folder), speculative_config=SpeculativeConfig(method="ngram"), max_num_seqs=4, num_pages=64)
    prompts = [p + " " + p + " " + p for p in PROMPTS[:4]]
    plain = [SamplingParams(temperature=0.0, max_tokens=24, num_speculative_tokens=0)] * 4
    fast = [SamplingParams(temperature=0.0, max_tokens=24)] * 4
    assert [ids_of(o) for o in ngram.generate(prompts, fast)] == [ids_of(o) for o in ngram.generate(prompts, plain)]
    assert ngram.metrics.num_draft_tokens > 0

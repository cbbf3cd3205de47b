"""Several samples of a prompt."""

from __future__ import annotations

import pytest

from jaxspec import SamplingParams
from tests.api.llm.answers import PROMPTS, ids_of


def test_n_samples(llm):
    """More than there are rows. Sample 0 is what n = 1 gives; the counters are those of all."""
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    before = llm.metrics.num_emitted_tokens
    output, other = llm.generate(PROMPTS[:2], SamplingParams(n=6, **params))
    assert llm.metrics.num_emitted_tokens - before == 2 * 6 * 12
    for o in (output, other):
        assert [c.index for c in o.outputs] == list(range(6))
        assert len({tuple(c.token_ids) for c in o.outputs}) == 6
        assert all(c.text == llm.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in o.outputs)
        assert o.metrics.num_emitted_tokens == 6 * 12
        assert o.metrics.num_draft_tokens >= 6 * 12 * 3 / 4
    assert ids_of(output) == ids_of(llm.generate(PROMPTS[0], SamplingParams(**params))[0])
    assert [c.token_ids for c in llm.generate(PROMPTS[0], SamplingParams(n=6, **params))[0].outputs] == [
        c.token_ids for c in output.outputs
    ]


@pytest.mark.thorough
def test_samples_stop_each_for_itself(llm):
    params = {"n": 4, "temperature": 1.0, "seed": 2, "max_tokens": 24, "ignore_eos": True}
    whole = llm.generate(PROMPTS[2], SamplingParams(**params))[0].outputs
    stop = whole[1].text[2:5]
    cut = llm.generate(PROMPTS[2], SamplingParams(**params, stop=stop))[0].outputs
    for full, short in zip(whole, cut, strict=True):
        assert short.text == full.text.split(stop)[0]
        assert short.stop_reason == (stop if stop in full.text else None)
    assert {c.finish_reason for c in cut} == {"stop", "length"}


def test_greedy_samples_are_alike(llm):
    output = llm.generate(PROMPTS[0], SamplingParams(n=2, temperature=0.0, max_tokens=8))[0]
    assert output.outputs[0].token_ids == output.outputs[1].token_ids

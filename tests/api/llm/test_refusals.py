"""What is refused, in a line that names it, and what stays usable."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from tests.api.llm.answers import GREEDY, PROMPTS, assert_idle, ids_of
from tests.support.model_folders import write_model
from tests.support.vocabularies import Failing


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 1: the prompt is empty"),
        ([5, 320], r"prompt 1: token id 320 is outside the vocabulary 0\.\.319"),
        ([5, -1], "prompt 1: token id -1 is outside"),
        ([5] * 512, "prompt 1: the prompt has 512 tokens, and this model's maximum context length is 512 tokens"),
        ([1.5], "prompt 1: token id=1.5 must be a whole number"),
        ([2**40], "prompt 1: token id=1099511627776 is above 2147483647"),
        ([True], "prompt 1: token id=True must be a whole number"),
        (b"abc", "prompt 1: b'abc' is not a prompt: give a string"),
        ({"prompt_token_ids": b"abc"}, "prompt 1: .* is not a prompt"),
        ({"prompt_token_ids": "abc"}, "prompt 1: .* is not a prompt"),
        ({"promt": "x"}, "prompt 1: unknown key 'promt' of a prompt: did you mean 'prompt'?"),
        ({"prompt": "x", "multi_modal_data": {}}, "prompt 1: unknown key 'multi_modal_data' of a prompt: known keys: "),
        ({}, "prompt 1: {} is not a prompt"),
        (None, "prompt 1: None is not a prompt"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_queued(llm, bad, message):
    before = llm.metrics.num_emitted_tokens
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPTS[0], bad, PROMPTS[1]], GREEDY)
    assert_idle(llm)
    assert llm.metrics.num_emitted_tokens == before
    if isinstance(bad, list) and bad and isinstance(bad[0], int):
        with pytest.raises(ValueError, match=message.replace("prompt 1", "prompt 0")):
            llm.stream(bad, GREEDY)


def test_a_request_that_no_pool_could_hold(llm, folder):
    small = LLM(str(folder), num_pages=3)
    with pytest.raises(ValueError, match=r"prompt 1: a request of .* the pool has 3, so .* lower max_tokens"):
        small.generate(["a", "b"], [SamplingParams(max_tokens=4), SamplingParams(max_tokens=400)])
    assert_idle(small)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "1 SamplingParams for 2 prompts"),
        ({"temperature": 0.0}, "give a SamplingParams, or a list"),
        ([GREEDY, {"temperature": 0.0}], "give a SamplingParams, or a list"),
        (SamplingParams(num_speculative_tokens=9), "num_speculative_tokens=9 of a request exceeds the engine's 3"),
        (SamplingParams(stop_token_ids=[999]), "stop token id 999 is outside"),
    ],
)
def test_bad_sampling_params(llm, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[:2], params)


def test_unknown_options_name_the_nearest(folder):
    for make, nearest in [
        (lambda: SamplingParams(max_token=3), "max_tokens"),
        (lambda: SamplingParams(max_new_tokens=3), "max_tokens"),
        (lambda: SpeculativeConfig(num_speculative_token=3), "num_speculative_tokens"),
        (lambda: LLM(str(folder), max_num_sequences=3), "max_num_seqs"),
        (lambda: LLM(str(folder), speculative_config={"modell": "x"}), "model"),
    ]:
        with pytest.raises(ValueError, match=f"unknown option .*did you mean '{nearest}'"):
            make()


def test_a_draft_with_another_tokenizer(folder, tmp_path):
    draft = write_model(tmp_path / "foreign", text="entirely different words make entirely different merges " * 3)
    with pytest.raises(ValueError, match="the draft 'foreign' has another tokenizer than the target 'target'"):
        LLM(str(folder), speculative_config={"model": str(draft)})


@pytest.mark.parametrize("n", [1, 3])
def test_an_interrupt_between_steps_leaves_the_engine_usable(llm, monkeypatch, n):
    params = SamplingParams(n=n, temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = ids_of(llm.generate(PROMPTS[0], params)[0])
    step, calls = llm.engine.step, itertools.count()

    def interrupted(*args, **kwargs):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params)
    assert_idle(llm)
    monkeypatch.undo()
    assert ids_of(llm.generate(PROMPTS[0], params)[0]) == expected


def failing(llm, monkeypatch, prompt: str) -> None:
    """From now on the second launch of this prompt's requests fails."""
    ids, step = llm.tokenizer.encode(prompt), llm.engine.step

    def failing_step(streaming):
        ran = step(streaming=streaming)
        for request in ran:
            if request.prompt == ids and request.finish_reason is None:
                llm.engine.abort(request)
                request.finish_reason, request.error = "error", "the launch failed: out of memory"
        return ran

    monkeypatch.setattr(llm.engine, "step", failing_step)


def test_a_request_that_fails_is_returned_with_its_error(llm, monkeypatch):
    expected = llm.generate(PROMPTS[:3], GREEDY)
    failing(llm, monkeypatch, PROMPTS[1])
    with pytest.warns(RuntimeWarning, match="^1 of 3 completions ended with an error, the first: the launch failed: "):
        outputs = llm.generate(PROMPTS[:3], GREEDY)
    for i in (0, 2):
        assert ids_of(outputs[i]) == ids_of(expected[i])
        assert (outputs[i].outputs[0].finish_reason, outputs[i].outputs[0].error) == ("length", None)
    failed = outputs[1].outputs[0]
    assert (failed.finish_reason, failed.error) == ("error", "the launch failed: out of memory")
    assert failed.token_ids == ids_of(expected[1])[: len(failed.token_ids)]
    last = list(llm.stream(PROMPTS[1], GREEDY))[-1]
    assert (last.finish_reason, last.error) == ("error", "the launch failed: out of memory")


@pytest.mark.parametrize("prompts", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_are_no_token_ids(llm, prompts):
    with pytest.raises(ValueError, match="is not a prompt: decode bytes to a string"):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)


def test_an_observer_that_fails_ends_nothing(llm, caplog):
    seen = []

    def observe(request):
        seen.append(request.id)
        raise LookupError("no such gauge")

    llm.observers.append(observe)
    try:
        outputs = llm.generate(PROMPTS[:2], GREEDY)
    finally:
        llm.observers.remove(observe)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 2 or all(o.outputs[0].text for o in outputs)
    assert len(seen) == 2
    assert "an observer failed" in caplog.text
    assert_idle(llm)


def test_a_tokenizer_that_fails_on_one_text_fails_one_sample(llm, monkeypatch):
    """With a stop string, when the row ends; without, when its text is made."""
    real = llm.tokenizer
    monkeypatch.setattr(llm, "tokenizer", Failing(real, lambda ids: False))
    expected = llm.generate(PROMPTS[:3], GREEDY)
    bad = ids_of(expected[1])[-2:]
    monkeypatch.setattr(llm, "tokenizer", Failing(real, lambda ids: list(ids)[-2:] == bad))
    for params in (GREEDY, dataclasses.replace(GREEDY, stop=("never said",))):
        with pytest.warns(RuntimeWarning, match="1 of 3 completions ended with an error, the first: IndexError"):
            outputs = llm.generate(PROMPTS[:3], params)
        assert [o.outputs[0].finish_reason for o in outputs][1] == "error"
        assert outputs[1].outputs[0].error == "IndexError: piece id is out of range"
        for i in (0, 2):
            assert outputs[i].outputs[0].text == expected[i].outputs[0].text
        assert_idle(llm)
    pieces = list(llm.stream(PROMPTS[:3], GREEDY))
    ends = {p.prompt_index: (p.finish_reason, p.error) for p in pieces if p.finish_reason}
    assert ends[1] == ("error", "IndexError: piece id is out of range")
    assert {ends[0][0], ends[2][0]} <= {"length", "stop"}
    assert_idle(llm)

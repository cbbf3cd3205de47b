"""AsyncLLM: callers of one event loop share an engine, and each gets what it would get alone."""

from __future__ import annotations

import asyncio

import pytest

from jaxspec import AsyncLLM, SamplingParams
from jaxspec.common.errors import UserError
from tests.api.async_llm.calls import GREEDY, LONG, PROMPTS, collect, run, spied, texts
from tests.support import tiny_models

# What comes out


def test_calls_that_overlap_share_batches(llm, expected, monkeypatch):
    steps = spied(llm, monkeypatch)

    async def main():
        return await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))

    outputs = run(main())
    assert texts(outputs) == texts(expected(PROMPTS))
    assert [o.prompt for o in outputs] == PROMPTS
    assert max(ran for _, ran in steps) == 4, "as many as there are rows"
    assert not any(streaming for streaming, _ in steps), "launches of full length"


@pytest.mark.parametrize(("own", "rounds"), [({}, 16), ({"rounds_per_launch": 5}, 5)])
def test_launches_are_shorter_as_others_may_come_meanwhile(folder, monkeypatch, own, rounds):
    llm = AsyncLLM(folder, max_num_seqs=1, num_pages=96, **own)
    asked = tiny_models.rounds_of_launches(llm.llm.engine, monkeypatch)
    run(llm.generate(PROMPTS[0], LONG))
    llm.shutdown()
    assert asked[0] == rounds


def test_streams_and_generations_together(llm, expected, monkeypatch):
    steps = spied(llm, monkeypatch)

    async def main():
        return await asyncio.gather(
            collect(llm.stream(PROMPTS[0], GREEDY)),
            llm.generate(PROMPTS[1], GREEDY),
            collect(llm.stream(PROMPTS[2], GREEDY)),
        )

    (first, _, reason), whole, (third, *_) = run(main())
    assert [first, whole.outputs[0].text, third] == texts(expected(PROMPTS[:3]))
    assert reason == "length"
    assert any(streaming for streaming, _ in steps)
    assert max(ran for _, ran in steps) > 1


def test_pieces_come_as_rounds_end(llm, monkeypatch):
    """Where no more than one round fits between two looks."""
    monkeypatch.setattr(llm.llm.engine.controller, "rounds_within", lambda *_: 1)

    async def main():
        return [piece async for piece in llm.stream(PROMPTS[0], GREEDY)]

    pieces = run(main())
    assert len(pieces) >= 24 / 5
    assert all(len(p.token_ids) <= 5 for p in pieces)


def test_samples_logprobs_and_stop_strings(llm, expected):
    params = SamplingParams(n=3, seed=4, max_tokens=12, ignore_eos=True, logprobs=1)
    (there,) = expected(PROMPTS[0], params)

    async def main():
        whole = await llm.generate(PROMPTS[0], params)
        pieces = [piece async for piece in llm.stream(PROMPTS[0], params)]
        return whole, pieces

    whole, pieces = run(main())
    assert [c.token_ids for c in whole.outputs] == [c.token_ids for c in there.outputs]
    assert [len(c.logprobs) for c in whole.outputs] == [12] * 3
    for sample, completion in enumerate(there.outputs):
        of_sample = [p for p in pieces if p.sample == sample]
        assert "".join(p.text for p in of_sample) == completion.text
        rows = [row for p in of_sample for row in p.logprobs]
        chosen = [row[i].logprob for i, row in zip(completion.token_ids, rows, strict=True)]
        wanted = [row[i].logprob for i, row in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert chosen == pytest.approx(wanted)
    stop = there.outputs[0].text[3:6]
    stopped = run(llm.generate(PROMPTS[0], SamplingParams(seed=4, max_tokens=12, ignore_eos=True, stop=stop)))
    assert stopped.outputs[0].text == there.outputs[0].text.split(stop)[0]

    async def last():
        streamed = llm.stream(PROMPTS[0], SamplingParams(seed=4, max_tokens=12, ignore_eos=True, stop=stop))
        return [piece async for piece in streamed][-1]

    assert (run(last()).stop_reason, stopped.outputs[0].stop_reason) == (stop, stop)


def test_one_loop_after_another(llm, expected):
    for prompt in PROMPTS[:2]:
        assert texts([run(llm.generate(prompt, GREEDY))]) == texts(expected(prompt))
    assert llm.metrics.num_emitted_tokens > 0
    assert llm.timing.num_tokens == llm.metrics.num_emitted_tokens


# Chats


def test_a_chat_is_answered(llm, expected):
    conversation = [{"role": "user", "content": PROMPTS[1]}]
    answer = run(llm.chat(conversation, GREEDY))
    (there,) = expected([llm.llm.render_chat(conversation)])
    assert (answer.prompt, texts([answer])) == (there.prompt, texts([there]))
    text, *_ = run(collect(llm.stream(llm.llm.render_chat(conversation), GREEDY)))
    assert [text] == texts([there])
    unanswered = run(llm.chat(conversation, GREEDY, add_generation_prompt=False))
    assert unanswered.prompt + "<bot>" == there.prompt
    with pytest.raises(UserError, match="one prompt a call, got 2"):
        run(llm.chat([conversation, conversation], GREEDY))


def test_prompts_are_prepared_in_any_thread(llm, expected):
    async def main():
        ask = await asyncio.to_thread(llm.prepare, PROMPTS[1], GREEDY)
        with pytest.raises(UserError, match="the prompt was prepared with sampling_params of its own"):
            llm.stream(ask, GREEDY)
        return await llm.generate(ask), await collect(llm.stream(ask))

    answer, (text, ids, _) = run(main())
    (there,) = expected(PROMPTS[1])
    assert texts([answer]) == [text] == texts([there])
    assert answer.outputs[0].token_ids == ids
    with pytest.raises(UserError, match="one prompt a call, got 2"):
        llm.prepare(PROMPTS[:2], GREEDY)


# What is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "one prompt a call, got 0"),
        ({"prompt_token_ids": []}, GREEDY, "the prompt is empty"),
        ([999], GREEDY, "token id 999 is outside"),
        (PROMPTS[:2], GREEDY, "one prompt a call, got 2: calls that overlap are decoded together"),
        (PROMPTS[0], {"temperature": 0}, "give a SamplingParams"),
        (PROMPTS[0], SamplingParams(stop_token_ids=[999]), "stop token id 999 is outside"),
        (PROMPTS[0], SamplingParams(bad_words=" "), "bad_words: ' ' has no tokens"),
    ],
)
def test_what_is_wrong_is_raised_before_anything_is_queued(llm, monkeypatch, prompt, params, message):
    told = []
    monkeypatch.setattr(llm._thread, "post", lambda *args: told.append(args))
    with pytest.raises(ValueError, match=message):
        llm.stream(prompt, params)
    with pytest.raises(ValueError, match=message):
        run(llm.generate(prompt, params))
    assert told == []


def test_what_the_engine_refuses_is_raised_in_its_caller_only(folder):
    async def main():
        async with AsyncLLM(folder, num_pages=3, max_num_seqs=2) as small:
            return await asyncio.gather(
                small.generate("a", SamplingParams(max_tokens=400)),
                small.generate("b", SamplingParams(max_tokens=4, ignore_eos=True)),
                return_exceptions=True,
            )

    refused, served = run(main())
    assert isinstance(refused, ValueError)
    assert "the pool has 3, so this model's maximum context length is 48 tokens" in str(refused)
    assert len(served.outputs[0].token_ids) == 4

"""AsyncLLM: callers of one event loop share an engine, and each can leave without the others' noticing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.async_llm import Call
from jaxspec.errors import UserError
from jaxspec.job import Job
from tests import tiny_models
from tests.llm.answers import one_shape
from tests.model_folders import write_model

PROMPTS = ["The quick brown fox", "Count the words: one, two,", "dog dog dog", "def total(items):", "Über-strong"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
OPTIONS = {"max_num_seqs": 4, "num_pages": 96, "rounds_per_launch": 4}
SOON = 60.0  # seconds in which what has to happen must happen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def expected(folder):
    """The greedy answers, and a function for others."""
    llm = one_shape(LLM(folder, **OPTIONS))
    return lambda prompts, params=GREEDY: llm.generate(prompts, params)


@pytest.fixture(scope="module")
def shared(folder):
    llm = AsyncLLM(folder, **OPTIONS)
    one_shape(llm.llm)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(shared):
    """After each test the engine is idle and holds no page."""
    yield shared
    assert_idle(shared)


@pytest.fixture
def own(folder):
    """For tests that end it."""
    llm = AsyncLLM(folder, **OPTIONS)
    yield llm
    llm.shutdown()


def assert_idle(llm: AsyncLLM) -> None:
    engine, until = llm.llm.engine, time.monotonic() + SOON
    while (engine.busy or llm._thread.calls) and time.monotonic() < until:
        time.sleep(0.01)
    assert not llm._thread.calls
    assert not engine.busy
    assert engine.scheduler.allocator.num_free == engine.num_pages


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SOON))


async def collect(stream) -> tuple[str, list[int], str | None]:
    pieces = [piece async for piece in stream]
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    ids = [i for p in pieces for i in p.token_ids]
    return "".join(p.text for p in pieces), ids, pieces[-1].finish_reason


def texts(outputs) -> list[str]:
    return [o.outputs[0].text for o in outputs]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def spied(llm: AsyncLLM, monkeypatch) -> list[tuple[bool, int]]:
    """(whether somebody reads along, requests that ran) of each step from now on."""
    steps, step = [], llm.llm.engine.step

    def spy(streaming):
        ran = step(streaming=streaming)
        steps.append((streaming, len(ran)))
        return ran

    monkeypatch.setattr(llm.llm.engine, "step", spy)
    return steps


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
        assert "".join(p.text for p in pieces if p.sample == sample) == completion.text
    stop = there.outputs[0].text[3:6]
    stopped = run(llm.generate(PROMPTS[0], SamplingParams(seed=4, max_tokens=12, ignore_eos=True, stop=stop)))
    assert stopped.outputs[0].text == there.outputs[0].text.split(stop)[0]


def test_one_loop_after_another(llm, expected):
    for prompt in PROMPTS[:2]:
        assert texts([run(llm.generate(prompt, GREEDY))]) == texts(expected(prompt))
    assert llm.metrics.num_emitted_tokens > 0
    assert llm.timing.num_tokens == llm.metrics.num_emitted_tokens


# Leaving


@pytest.mark.parametrize("how", ["break", "exception", "cancel", "close"])
def test_who_leaves_a_stream_ends_that_request_only(llm, expected, how):
    """The others' texts are whole, and the one who left decodes no further."""
    before = llm.metrics.num_emitted_tokens

    async def leave():
        if how == "close":
            async with contextlib.aclosing(llm.stream(PROMPTS[0], LONG)) as stream:
                await anext(stream)
            return
        async for _ in llm.stream(PROMPTS[0], LONG):
            if how == "break":
                break
            if how == "exception":
                raise ZeroDivisionError
            asyncio.current_task().cancel()

    async def main():
        results = await asyncio.gather(
            leave(), *(collect(llm.stream(p, GREEDY)) for p in PROMPTS[1:4]), return_exceptions=True
        )
        await until(lambda: not llm._thread.calls)
        return results

    left, *others = run(main())
    wanted = {"exception": ZeroDivisionError, "cancel": asyncio.CancelledError}
    assert isinstance(left, wanted.get(how, type(None)))
    assert [text for text, *_ in others] == texts(expected(PROMPTS[1:4]))
    assert_idle(llm)
    assert 3 * 24 < llm.metrics.num_emitted_tokens - before < 3 * 24 + 200


def test_a_generation_that_is_cancelled(llm, expected):
    async def main():
        doomed = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
        other = asyncio.create_task(llm.generate(PROMPTS[1], GREEDY))
        await until(lambda: len(llm._thread.calls) == 2)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await other

    assert texts([run(main())]) == texts(expected(PROMPTS[1]))


def test_a_stream_that_never_started_asks_for_nothing(llm, monkeypatch):
    steps = spied(llm, monkeypatch)

    async def main():
        llm.stream(PROMPTS[0], GREEDY)
        await asyncio.sleep(0.05)

    run(main())
    assert steps == []


def test_a_loop_that_is_closed_listens_no_more(llm, expected):
    loop = asyncio.new_event_loop()
    call = Call(llm._prepare(PROMPTS[0], LONG, None), Job.pieces, 1, loop)
    loop.close()
    llm._thread.tell(llm._thread.open, call)
    assert texts([run(llm.generate(PROMPTS[1], GREEDY))]) == texts(expected(PROMPTS[1]))
    assert_idle(llm)
    assert call.job.requests[0].finish_reason == "abort"


# Chats


def test_a_chat_is_answered(llm, expected):
    conversation = [{"role": "user", "content": PROMPTS[1]}]
    answer = run(llm.chat(conversation, GREEDY))
    (there,) = expected([llm.llm.render_chat(conversation)])
    assert (answer.prompt, texts([answer])) == (there.prompt, texts([there]))
    text, *_ = run(collect(llm.stream(llm.llm.render_chat(conversation), GREEDY)))
    assert [text] == texts([there])
    with pytest.raises(UserError, match="one prompt a call, got 2"):
        run(llm.chat([conversation, conversation], GREEDY))


# Names of requests


def test_requests_have_the_names_that_they_are_given(llm):
    async def main():
        whole = [await llm.generate(PROMPTS[0], GREEDY, request_id="a"), await llm.generate(PROMPTS[1], GREEDY)]
        talk = await llm.chat([{"role": "user", "content": "x"}], GREEDY, "b")
        return whole, talk, [piece.request_id async for piece in llm.stream(PROMPTS[0], GREEDY, "a")]

    (named, unnamed), talk, pieces = run(main())
    assert (named.request_id, talk.request_id, set(pieces)) == ("a", "b", {"a"})
    assert isinstance(unnamed.request_id, str)
    assert len(unnamed.request_id) > 20
    assert named.finished
    assert not llm._calls


def test_a_name_belongs_to_one_request_at_a_time(llm, expected):
    async def main():
        first = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY, "same"))
        await until(lambda: llm._calls)
        with pytest.raises(UserError, match="request_id='same' is in use: choose another, or give none"):
            await llm.generate(PROMPTS[1], GREEDY, "same")
        with pytest.raises(UserError, match="request_id='same' is in use"):
            await anext(llm.stream(PROMPTS[1], GREEDY, "same"))
        return await first, await llm.generate(PROMPTS[1], GREEDY, "same")

    assert texts(run(main())) == texts(expected(PROMPTS[:2]))


@pytest.mark.parametrize("name", [7, "", b"a"])
def test_a_name_is_a_string(llm, name):
    with pytest.raises(UserError, match=r"request_id=.* must be a string that is not empty"):
        llm.stream(PROMPTS[0], GREEDY, name)


def test_abort_ends_the_request_of_that_name_only(llm, expected):
    """Its call returns what there is, its stream has a last piece."""

    async def main():
        stream = llm.stream(PROMPTS[0], LONG, "read")
        first = await anext(stream)
        waiting = asyncio.create_task(llm.generate(PROMPTS[1], LONG, "waiting"))
        other = asyncio.create_task(llm.generate(PROMPTS[2], GREEDY, "other"))
        await until(lambda: len(llm._thread.calls) == 3)
        for name in ("read", "waiting", "nobody"):
            await llm.abort(name)
        rest = [piece async for piece in stream]
        whole, unhurt = await waiting, await other
        await llm.abort("waiting")  # it has ended
        return first, rest, whole, unhurt

    first, rest, whole, unhurt = run(main())
    assert (first.finish_reason, rest[-1].finish_reason) == (None, "abort")
    assert whole.outputs[0].finish_reason == "abort"
    assert whole.finished
    assert len(whole.outputs[0].token_ids) < 300
    (there,) = expected(PROMPTS[1], LONG)
    assert there.outputs[0].text.startswith(whole.outputs[0].text)
    assert texts([unhurt]) == texts(expected(PROMPTS[2]))


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
    monkeypatch.setattr(llm._thread, "tell", lambda *args: told.append(args))
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
    assert "the pool has 3: lower max_tokens" in str(refused)
    assert len(served.outputs[0].token_ids) == 4


# The thread


def test_the_thread_sleeps_while_nothing_runs(llm, monkeypatch):
    run(llm.generate(PROMPTS[0], GREEDY))
    assert_idle(llm)
    steps = spied(llm, monkeypatch)
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.25
    assert steps == []
    assert llm._thread.is_alive()


def test_an_engine_that_fails_lets_nobody_wait(own, monkeypatch):
    step = own.llm.engine.step

    def failing(streaming):
        if len(own._thread.calls) == 3:
            raise MemoryError("the device is full")
        return step(streaming=streaming)

    monkeypatch.setattr(own.llm.engine, "step", failing)

    async def main():
        return await asyncio.gather(
            collect(own.stream(PROMPTS[0], LONG)),
            own.generate(PROMPTS[1], LONG),
            own.generate(PROMPTS[2], LONG),
            return_exceptions=True,
        )

    errors = run(main())
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "the engine failed: MemoryError('the device is full')" in str(error)
        assert isinstance(error.__cause__, MemoryError)
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(RuntimeError, match="the engine failed: MemoryError"):
        own.stream(PROMPTS[0])
    with pytest.raises(RuntimeError, match="the engine failed: MemoryError"):
        run(own.generate(PROMPTS[0]))


def test_a_call_that_the_thread_can_hear_no_more_does_not_wait(own):
    """The thread ends between the check of a prompt and its queueing."""

    async def main():
        stream = own.stream(PROMPTS[0], GREEDY)
        own.shutdown()
        await anext(stream)

    with pytest.raises(RuntimeError, match="the AsyncLLM was shut down"):
        run(main())


def test_shutdown_ends_what_is_open(own):
    async def main():
        stream = own.stream(PROMPTS[0], LONG)
        await anext(stream)
        waiting = asyncio.create_task(own.generate(PROMPTS[1], LONG))
        await until(lambda: len(own._thread.calls) == 2)
        own.shutdown()
        own.shutdown()
        for open_call in (collect(stream), waiting):
            with pytest.raises(RuntimeError, match="the AsyncLLM was shut down"):
                await open_call
        with pytest.raises(RuntimeError, match="the AsyncLLM was shut down"):
            await own.generate(PROMPTS[0])

    run(main())
    assert not own._thread.is_alive()
    assert_idle(own)


def test_the_context_manager_shuts_down(folder):
    async def main():
        async with AsyncLLM(folder, **OPTIONS) as llm:
            await llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
        return llm

    assert not run(main())._thread.is_alive()


def test_one_that_is_dropped_ends_its_thread(folder):
    llm = AsyncLLM(folder, **OPTIONS)
    thread = llm._thread
    assert thread in threading.enumerate()
    del llm
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_second_failure_while_the_first_is_handled_lets_nobody_wait(own, monkeypatch):
    """Whatever else fails then: aborting, a call's own loop, what is still in the inbox."""
    own._thread.tell(lambda: None)

    def failing(*_, **__):
        raise SystemExit("the device is gone")

    async def main():
        calls = [asyncio.create_task(own.generate(p, LONG)) for p in PROMPTS[:3]]
        await until(lambda: len(own._thread.calls) == 3)
        monkeypatch.setattr(own.llm, "_abort", failing)
        own._thread.tell(failing)
        own._thread.tell(failing)
        late = [asyncio.create_task(own.generate(p, LONG)) for p in PROMPTS[:2]]
        return await asyncio.gather(*calls, *late, return_exceptions=True)

    for error in run(main()):
        assert isinstance(error, RuntimeError)
        assert "the engine failed: SystemExit('the device is gone')" in str(error)
    own._thread.join(SOON)
    assert not own._thread.is_alive()


def test_a_text_that_cannot_be_made_is_its_callers_trouble(llm, expected, monkeypatch):
    output = Job.output

    def failing(job):
        if job.ask.text == PROMPTS[0]:
            raise LookupError("no such word")
        return output(job)

    monkeypatch.setattr(Job, "output", failing)

    async def main():
        return await asyncio.gather(*(llm.generate(p, GREEDY) for p in PROMPTS[:3]), return_exceptions=True)

    first, *others = run(main())
    assert isinstance(first, LookupError)
    monkeypatch.undo()
    assert texts(others) == texts(expected(PROMPTS[1:3]))


def test_rows_that_fail_as_they_end_leave(llm, expected):
    """A callback that fails with the last token: the row is gone, later callers are served."""

    async def main():
        doomed = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
        await until(lambda: llm._thread.calls)

        def find_stop(output, known):
            if len(output) >= 24:
                raise LookupError("no such text")

        for request in llm._thread.calls:
            request.find_stop = find_stop
        return await doomed, await llm.generate(PROMPTS[1], GREEDY)

    first, second = run(main())
    assert first.outputs[0].finish_reason in ("error", "length")  # the thread may have been faster
    assert texts([second]) == texts(expected(PROMPTS[1]))

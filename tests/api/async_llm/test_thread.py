"""AsyncLLM's thread: it sleeps while nothing runs, ends with its owner, and lets nobody wait where something fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from jaxspec import AsyncLLM, SamplingParams
from jaxspec.api.completions import PromptRun
from tests.api.async_llm.calls import (
    GREEDY,
    LONG,
    OPTIONS,
    PROMPTS,
    SOON,
    assert_idle,
    collect,
    run,
    spied,
    texts,
    until,
)


def test_the_thread_sleeps_while_nothing_runs(llm, monkeypatch):
    run(llm.generate(PROMPTS[0], GREEDY))
    assert_idle(llm)
    steps = spied(llm, monkeypatch)
    spent = cpu_seconds(llm._thread)
    time.sleep(0.5)
    assert cpu_seconds(llm._thread) - spent < 0.05
    assert steps == []
    assert llm._thread.is_alive()


def cpu_seconds(thread) -> float:
    """Time that it computed, which what others compute does not add to."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


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
        run(own.check_health())
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
            await llm.check_health()
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
    output = PromptRun.output

    def failing(prompt_run):
        if prompt_run.prompt_request.text == PROMPTS[0]:
            raise LookupError("no such word")
        return output(prompt_run)

    monkeypatch.setattr(PromptRun, "output", failing)

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


def test_calls_are_served_while_programs_are_compiled(folder, expected):
    """And nothing is compiled any more once it was shut down."""
    options = OPTIONS | {"max_num_seqs": 1, "warm_up": True, "wait_for_warm_up": False}
    llm = AsyncLLM(folder, **options)
    warming = llm.llm._warming
    assert warming.is_alive()
    assert texts([run(llm.generate(PROMPTS[0], GREEDY))]) == texts(expected(PROMPTS[0]))
    assert llm.timing.num_compiled > 0
    llm.shutdown()
    assert not warming.is_alive()

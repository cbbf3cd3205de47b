"""structured_outputs of AsyncLLM: a build keeps nobody else waiting, and its caller can leave meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxspec import SamplingParams
from jaxspec.common.errors import UserError
from jaxspec.grammars import build
from tests.api.async_llm.calls import GREEDY, PROMPTS, SOON, collect, run, texts, until


def chosen(*texts: str) -> SamplingParams:
    return SamplingParams(max_tokens=20, structured_outputs={"choice": texts})


@pytest.fixture
def held(monkeypatch):
    """Builds begin, and go on when `go` is set."""

    class Held:
        began, go = threading.Event(), threading.Event()

    own = build.automaton

    def slow(*args):
        Held.began.set()
        assert Held.go.wait(SOON)
        return own(*args)

    monkeypatch.setattr(build, "automaton", slow)
    yield Held
    Held.go.set()


def test_neighbours_do_not_wait_for_a_build(llm, expected, held):
    async def main():
        slow = asyncio.create_task(llm.generate(PROMPTS[0], chosen("slow one")))
        await until(held.began.is_set)
        others = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS[1:3]))
        assert not slow.done()
        held.go.set()
        return await slow, others

    slow, others = run(main())
    assert texts([slow]) == ["slow one"]
    assert texts(others) == texts(expected(PROMPTS[1:3]))


def test_a_stream_with_a_form(llm):
    text, _, reason = run(collect(llm.stream(PROMPTS[0], chosen("red", "blue"))))
    assert (text in ("red", "blue"), reason) == (True, "stop")


def test_a_request_is_aborted_during_its_build(llm, held):
    async def main():
        slow = asyncio.create_task(llm.generate(PROMPTS[0], chosen("aborted"), request_id="slow"))
        await until(held.began.is_set)
        await llm.abort("slow")
        output = await slow
        assert not held.go.is_set()
        held.go.set()
        assert texts([await llm.generate(PROMPTS[0], chosen("other"))]) == ["other"]
        return output

    (completion,) = run(main()).outputs
    assert (completion.text, completion.finish_reason) == ("", "abort")


def test_a_caller_leaves_during_a_build(llm, held):
    """The automaton is there later, and opens nothing."""

    async def main():
        slow = asyncio.create_task(llm.generate(PROMPTS[0], chosen("left"), request_id="slow"))
        await until(held.began.is_set)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        before = llm.metrics.num_emitted_tokens
        held.go.set()
        assert texts([await llm.generate(PROMPTS[0], chosen("left"), request_id="slow")]) == ["left"]
        assert llm.metrics.num_emitted_tokens - before <= 6
        return before

    run(main())


def test_a_build_that_fails_is_that_requests_error_only(llm, expected):
    async def main():
        wrong = SamplingParams(structured_outputs={"regex": ".*a.{20}"})
        calls = (llm.generate(PROMPTS[0], wrong), llm.generate(PROMPTS[1], GREEDY), collect(llm.stream("x", wrong)))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, other, last = run(main())
    assert texts([other]) == texts(expected(PROMPTS[1]))
    for error in (first, last):
        assert isinstance(error, UserError)
        assert "structured_outputs: the grammar has more than 16384 states" in str(error)


def test_shutdown_during_a_build_ends_the_call(own, held):
    async def main():
        slow = asyncio.create_task(own.generate(PROMPTS[0], chosen("shut")))
        await until(held.began.is_set)
        await asyncio.to_thread(own.shutdown)
        held.go.set()
        with pytest.raises(RuntimeError, match="the AsyncLLM was shut down"):
            await slow

    run(main())

"""Each caller of an AsyncLLM can leave without the others' noticing: by itself, or by its request's name."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from jaxspec.api.completions import PromptRun
from jaxspec.api.engine_thread import Call
from jaxspec.common.errors import UserError
from tests.api.async_llm.calls import GREEDY, LONG, PROMPTS, assert_idle, collect, run, spied, texts, until


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
    call = Call(llm._prepare(PROMPTS[0], LONG, None), PromptRun.pieces, 1, loop)
    loop.close()
    llm._thread.post(llm._thread.open, call)
    assert texts([run(llm.generate(PROMPTS[1], GREEDY))]) == texts(expected(PROMPTS[1]))
    assert_idle(llm)
    assert call.prompt_run.requests[0].finish_reason == "abort"


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

"""Prompts, parameters and helpers for tests of AsyncLLM."""

from __future__ import annotations

import asyncio
import time

from jaxspec import AsyncLLM, SamplingParams

PROMPTS = ["The quick brown fox", "Count the words: one, two,", "dog dog dog", "def total(items):", "Über-strong"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
OPTIONS = {"max_num_seqs": 4, "num_pages": 96, "rounds_per_launch": 4}
SOON = 300.0  # seconds in which what has to happen must happen, however busy the machine is


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

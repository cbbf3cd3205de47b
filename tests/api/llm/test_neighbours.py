"""One request's trouble on the host, in a tokenizer or by an interrupt, is no other's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.api.completions import PromptRun
from tests.api.async_llm.calls import SOON
from tests.api.llm.answers import GREEDY, PROMPTS, assert_idle, ids_of, text_of
from tests.checkpoints.files import fails
from tests.support.sizes import cases
from tests.support.vocabularies import Failing

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ROWS = 4  # of the shared engine


def failing(llm: LLM, monkeypatch, at: Callable[[list[int]], bool]) -> None:
    monkeypatch.setattr(llm, "tokenizer", Failing(llm.tokenizer, at))


def test_texts_that_cannot_be_read_hold_no_rows(llm, monkeypatch):
    """As many streams as there are rows fail before they have ended. Observers are told, and who comes is served."""
    told: list[Any] = []
    monkeypatch.setattr(llm, "observers", [told.append])
    (expected,) = llm.generate(PROMPTS[3], GREEDY)
    with monkeypatch.context() as broken:
        failing(llm, broken, lambda ids: len(ids) > 0)
        pieces = list(llm.stream(PROMPTS[:ROWS], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)))
    assert [piece.finish_reason for piece in pieces] == ["error"] * ROWS
    assert {piece.error for piece in pieces} == {"IndexError: piece id is out of range"}
    (after,) = llm.generate(PROMPTS[3], GREEDY)
    assert text_of(after) == text_of(expected)
    assert [request.finish_reason for request in told] == ["length", *["error"] * ROWS, "length"]


def test_nor_do_they_while_others_read_on(llm, monkeypatch):
    """A stream of more prompts than rows, of which the first ones fail."""
    with monkeypatch.context() as broken:
        bad = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:ROWS]]
        real = PromptRun.pieces

        def pieces(prompt_run: PromptRun) -> list[Any]:
            for sample in prompt_run.samples if prompt_run.prompt_request.ids in bad else ():
                sample.detokenizer.reader = None
            return real(prompt_run)

        broken.setattr(PromptRun, "pieces", pieces)
        found = list(llm.stream(PROMPTS, GREEDY))
    last = {piece.prompt_index: piece.finish_reason for piece in found}
    assert last == dict.fromkeys(range(ROWS), "error") | {ROWS: "length"}
    assert "".join(p.text for p in found if p.prompt_index == ROWS) == text_of(llm.generate(PROMPTS[ROWS], GREEDY)[0])


def test_nor_in_a_server(folder, monkeypatch):
    async def main() -> None:
        llm = AsyncLLM(str(folder), max_num_seqs=2, num_pages=64)
        last = lambda pieces: pieces[-1].finish_reason

        async def read(prompt: str) -> list[Any]:
            return [piece async for piece in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=100))]

        with monkeypatch.context() as broken:
            failing(llm.llm, broken, lambda ids: len(ids) > 0)
            assert list(map(last, await asyncio.gather(*map(read, PROMPTS[:2])))) == ["error"] * 2
        good = await asyncio.wait_for(llm.generate(PROMPTS[3], GREEDY), SOON)
        assert good.outputs[0].finish_reason == "length"
        llm.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_says_nothing(llm, monkeypatch, stream):
    """Among the likeliest of one request, where a tokenizer fails at ids of a padded table."""
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    with monkeypatch.context() as sound:
        failing(llm, sound, lambda ids: False)
        (whole,) = llm.generate(PROMPTS[0], asked)
    other = next(i for i in whole.outputs[0].logprobs[2] if i not in ids_of(whole))
    failing(llm, monkeypatch, lambda ids: list(ids) == [other])
    if stream:
        pieces = list(llm.stream(PROMPTS[:2], [asked, SHORT]))
        rows = [row for piece in pieces if not piece.prompt_index for row in piece.logprobs]
        assert {piece.finish_reason for piece in pieces} == {None, "length"}
    else:
        found = llm.generate(PROMPTS[:2], [asked, SHORT])
        assert [output.outputs[0].finish_reason for output in found] == ["length"] * 2
        rows = found[0].outputs[0].logprobs
    assert rows[2][other].decoded_token is None
    texts = lambda rows: [{i: entry.decoded_token for i, entry in row.items() if i != other} for row in rows]
    assert texts(rows) == texts(whole.outputs[0].logprobs)


@contextlib.contextmanager
def at_line(number: int, files: Sequence[str], act: Callable[[], Any]) -> Iterator[Callable[[], bool]]:
    """Inside, act is called where so many lines of these files were reached; yields whether that is still to be."""
    left = [number]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in files):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                act()
        return trace

    sys.settrace(trace)
    try:
        yield lambda: left[0] > 0
    finally:
        sys.settrace(None)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_requests_are_queued(llm):
    """Whatever the line: nothing of them stays behind."""
    files = (
        "api/completions",
        "api/llm",
        "engine/open_requests",
        "engine/scheduler",
        "api/detokenizer",
        "engine/arrivals",
    )
    asked = llm._prepare(PROMPTS[:2], SHORT)
    for line in itertools.count(1):
        prompt_runs: list[PromptRun] = []
        with contextlib.suppress(KeyboardInterrupt), at_line(line, files, interrupt) as waiting:
            llm._submit_all(asked, prompt_runs)
        for prompt_run in prompt_runs:
            llm._abort(prompt_run)
        assert not [r for r in llm.engine.open_requests.open.values() if r.finish_reason is None], line
        llm.generate(PROMPTS[3], SHORT)
        assert_idle(llm)
        assert not llm.engine.busy
        if waiting():
            break
    assert line > 60


class Dropped:
    """A stream in a cycle."""

    def __init__(self, llm: LLM) -> None:
        self.stream, self.own = llm.stream(PROMPTS[0], GREEDY), self
        next(self.stream)


@cases("first", [1, 2, 3], quick=[1], rest=[])
def test_streams_that_the_collector_finds_anywhere(llm, first):
    """They end wherever Python looks for cycles, be it in the middle of what the engine does for another request."""
    files = ("engine/open_requests", "engine/scheduler", "cache/allocator")
    submit = lambda: llm._submit(llm._prepare([PROMPTS[3]], SHORT)[0])
    (expected,) = llm.generate(PROMPTS[3], SHORT)
    collect = functools.partial(gc.collect, 0)  # new objects, and not all that other tests have made
    gc.disable()
    try:
        for line in itertools.count(first, 3):
            Dropped(llm)
            with at_line(line, files, collect) as waiting:
                prompt_run = submit()
            for _ in range(20):
                llm._step()
            assert prompt_run.ended, line
            assert prompt_run.output().outputs[0].token_ids == ids_of(expected)
            other = submit()
            llm.engine.step(1)
            Dropped(llm)
            with at_line(line, files, collect) as waiting_too:
                llm._abort(other)
            collect()
            if waiting() and waiting_too():
                break
    finally:
        gc.enable()
    llm.generate(PROMPTS[3], SHORT)
    assert line > 20


def test_a_head_that_makes_no_numbers_is_refused(folder, tmp_path):
    """Whoever is told the largest logit only would not see it."""
    shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][300, 3] = np.inf
    save_file(tensors, tmp_path / "damaged" / "model.safetensors")
    with fails(ValueError, "damaged: head, of which all logits are made, holds numbers that are not finite"):
        LLM(str(tmp_path / "damaged"))


@pytest.mark.parametrize("make", [np.array, lambda rows: [np.array(row) for row in rows]])
def test_arrays_of_prompts(llm, make):
    rows = [[5, 6, 7], [8, 9, 10]]
    assert list(map(ids_of, llm.generate(make(rows), SHORT))) == list(map(ids_of, llm.generate(rows, SHORT)))


def test_what_a_message_says(llm):
    said = lambda content: llm.render_chat([{"role": "user", "content": content}])["prompt"]
    assert said([{"type": "text", "text": "Count"}, {"type": "text", "text": "words"}]) == said("Count\nwords")
    for content in ([{"type": "image_url", "image_url": {}}], None, 3, [], [{"type": "text"}]):
        with fails(ValueError, "messages[0] has content=", "give a string, or a list of text parts"):
            said(content)

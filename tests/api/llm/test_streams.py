"""Streams: the pieces of what generation gives, whole characters, pages freed."""

from __future__ import annotations

import itertools

import pytest

from jaxspec import SamplingParams
from tests.api.llm.answers import GREEDY, PROMPTS, assert_idle, ids_of, stop_string, text_of


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_stream_is_the_generation_in_pieces(llm, prompt, sampled):
    """The random model splits characters over tokens, which no piece may show half."""
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True) if sampled else GREEDY
    pieces = list(llm.stream(prompt, params))
    whole = llm.generate(prompt, params)[0].outputs[0]
    assert "".join(p.text for p in pieces) == whole.text
    assert [i for p in pieces for i in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert 1 < len(pieces) <= 24


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_never_shows_the_beginning_of_a_stop_string(llm, include, monkeypatch):
    """A round at a time, so that a piece ends within it."""
    monkeypatch.setattr(llm.engine.controller, "rounds_within", lambda *_: 1)
    stop, text, _ = stop_string(llm, slice(8, 13))
    params = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop, include_stop_str_in_output=include
    )
    pieces = list(llm.stream(PROMPTS[3], params))
    assert "".join(p.text for p in pieces) == text[: text.index(stop) + len(stop) * include]
    assert [i for p in pieces for i in p.token_ids] == ids_of(llm.generate(PROMPTS[3], params)[0])
    assert pieces[-1].finish_reason == "stop"


def test_a_dropped_stream_frees_its_pages(llm):
    pieces = llm.stream(PROMPTS[0], GREEDY)
    next(pieces)
    assert llm.engine.scheduler.running
    pieces.close()
    assert_idle(llm)
    never_started = llm.stream(PROMPTS[0], GREEDY)
    assert_idle(llm)
    del never_started
    assert_idle(llm)


def test_streams_and_generation_at_the_same_time(llm):
    """Each step advances whatever runs; nobody loses a piece to another one's steps."""
    expected = [text_of(o) for o in llm.generate(PROMPTS[:3], GREEDY)]
    a, b = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    first = [next(a).text, next(b).text]
    between = text_of(llm.generate(PROMPTS[2], GREEDY)[0])
    rest = list(itertools.zip_longest(a, b))
    got = ["".join(piece.text for piece in column if piece) for column in zip(*rest, strict=True)]
    assert [x + y for x, y in zip(first, got, strict=True)] + [between] == expected


def joined(pieces) -> dict[tuple[int, int], tuple[str, list[int], str | None]]:
    """(prompt, sample) -> its text, its ids, how it ended."""
    found = {}
    for piece in pieces:
        text, ids, reason = found.get((piece.prompt_index, piece.sample), ("", [], None))
        assert reason is None, "nothing follows the last piece"
        found[piece.prompt_index, piece.sample] = text + piece.text, ids + piece.token_ids, piece.finish_reason
    return found


def test_a_stream_of_several_prompts(llm):
    """More than there are rows, of different lengths, some with two samples."""
    params = [SamplingParams(n=1 + i % 2, seed=i, max_tokens=20 - 4 * i, ignore_eos=True) for i in range(5)]
    pieces = list(llm.stream(PROMPTS, params))
    expected = {
        (i, c.index): (c.text, c.token_ids, c.finish_reason)
        for i, output in enumerate(llm.generate(PROMPTS, params))
        for c in output.outputs
    }
    assert len(expected) == 7
    assert joined(pieces) == expected
    runs = [key for key, _ in itertools.groupby((p.prompt_index, p.sample) for p in pieces)]
    assert len(runs) > 2 * len(expected), "the pieces of prompts that are decoded together come in turn"


def test_all_prompts_of_a_stream_are_checked_before_the_first_piece(llm):
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        llm.stream([PROMPTS[0], []], GREEDY)
    with pytest.raises(ValueError, match="1 SamplingParams for 2 prompts"):
        llm.stream(PROMPTS[:2], [GREEDY])
    assert list(llm.stream([], GREEDY)) == []


def test_a_dropped_stream_of_several_prompts_frees_all_pages(llm):
    pieces = llm.stream(PROMPTS, SamplingParams(n=2, max_tokens=24, ignore_eos=True))
    next(pieces)
    assert len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting) == 10
    pieces.close()
    assert_idle(llm)

"""Where an output ends: stop strings, end ids, lengths."""

from __future__ import annotations

import itertools

import pytest

from jaxspec import SamplingParams
from tests.api.llm.answers import GREEDY, PROMPTS, ids_of, stop_string, text_of
from tests.support.model_folders import EOS
from tests.support.sizes import cases


@cases("include", [False, True], quick=[True])
def test_stop_strings_at_every_offset_of_an_accepted_run(llm, include):
    """Across token boundaries, wherever in a round of four tokens they fall; text and tokens are cut."""
    offsets = set()
    for prompt, first in itertools.product(PROMPTS[2:], range(2, 18)):
        stop, text, ids = stop_string(llm, slice(first, first + 2), prompt)
        if not stop or "\ufffd" in stop:
            continue  # the random model makes invalid UTF-8 too
        params = SamplingParams(
            temperature=0.0,
            max_tokens=24,
            ignore_eos=True,
            stop=[stop, "never there"],
            include_stop_str_in_output=include,
        )
        output = llm.generate(prompt, params)[0]
        at = text.index(stop)
        assert text_of(output) == text[: at + len(stop) * include]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        kept = ids_of(output)
        assert kept == ids[: len(kept)]
        assert stop in llm.tokenizer.decode(kept)
        assert stop not in llm.tokenizer.decode(kept[:-1])
        assert output.metrics.num_emitted_tokens == len(kept)
        offsets.add(len(kept) % 4)
    assert offsets == {0, 1, 2, 3}


def test_the_drafts_are_accepted_in_runs(llm):
    """What the tests above rest on."""
    assert llm.generate(PROMPTS[3], GREEDY)[0].metrics.mean_acceptance_length > 3.0


def test_stop_ids_and_length(llm):
    ids = ids_of(llm.generate(PROMPTS[0], GREEDY)[0])
    wanted = next(i for i in ids[3:] if i not in ids[:3])
    at = ids.index(wanted)
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "stop_token_ids": [wanted]}
    hidden = llm.generate(PROMPTS[0], SamplingParams(**params))[0]
    shown = llm.generate(PROMPTS[0], SamplingParams(**params, include_stop_str_in_output=True))[0]
    for output, text_ids in ((hidden, ids[:at]), (shown, ids[: at + 1])):
        assert ids_of(output) == ids[: at + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", wanted)
        assert text_of(output) == llm.tokenizer.decode(text_ids)
    by_length = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert (by_length.finish_reason, by_length.stop_reason) == ("length", None)


def test_the_models_own_end_ids(llm):
    assert llm.stop_ids == (EOS,)
    llm_stop_ids, llm.stop_ids = llm.stop_ids, tuple(ids_of(llm.generate(PROMPTS[0], GREEDY)[0])[5:6])
    try:
        stopped = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0]
        ignored = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    finally:
        llm.stop_ids = llm_stop_ids
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) <= 6
    assert len(ignored.token_ids) == 24


def test_a_stop_string_within_the_first_min_tokens_ends_nothing(llm):
    """The same string, met again after them, does."""
    stop, text, ids = stop_string(llm, slice(4, 6))
    first = next(n for n in range(1, 25) if stop in llm.tokenizer.decode(ids[:n]))
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "stop": stop}
    ended = {n: llm.generate(PROMPTS[3], SamplingParams(**params, min_tokens=n))[0] for n in (0, first - 1, first)}
    assert ids_of(ended[0]) == ids_of(ended[first - 1]) == ids[:first]
    assert len(ids_of(ended[first])) > first
    assert text_of(ended[first]).startswith(text[: text.index(stop) + len(stop)])
    again = "".join(p.text for p in llm.stream(PROMPTS[3], SamplingParams(**params, min_tokens=first)))
    assert again == text_of(ended[first])


@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_that_the_text_hides_stops_it(llm, include):
    """In a stream as in a whole answer."""
    hidden = llm.tokenizer.convert_tokens_to_ids("<user>")
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, stop=["never", "<user>"], include_stop_str_in_output=include,
        min_tokens=2, logit_bias={hidden: 100.0},
    )  # fmt: skip
    output = llm.generate(PROMPTS[0], params)[0]
    assert ids_of(output) == [hidden] * 3
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "<user>")
    assert text_of(output) == "<user>" * include
    assert "".join(piece.text for piece in llm.stream(PROMPTS[0], params)) == text_of(output)


@pytest.mark.parametrize("include", [False, True])
def test_half_a_character_at_the_end_is_a_stop_string(llm, include):
    """U+FFFD, which it is when the answer ends."""
    half = llm.tokenizer.convert_tokens_to_ids("Ã")  # the byte C3
    params = SamplingParams(
        temperature=0.0, max_tokens=1, stop="\ufffd", include_stop_str_in_output=include, logit_bias={half: 100.0}
    )
    output = llm.generate(PROMPTS[0], params)[0]
    assert ids_of(output) == [half]
    assert text_of(output) == "\ufffd" * include
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "\ufffd")
    (piece,) = llm.stream(PROMPTS[0], params)
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("\ufffd" * include, "stop", "\ufffd")

"""LLM: text and token ids in, outputs in order, streams, stop strings, errors that name what is wrong."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams, SpeculativeConfig
from tests.folders import BOS, EOS, write_model

PROMPTS = ["The quick brown fox", "Count the words: one, two,", "dog dog dog", "def total(items):", "Über-strong"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def llm(folder):
    """The target drafts for itself: nearly every round accepts all K drafts, so stops fall into accepted runs."""
    speculative = {"model": str(folder), "num_speculative_tokens": 3}
    return LLM(str(folder), speculative_config=speculative, max_num_seqs=4, num_pages=64, rounds_per_launch=4)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """After each test that uses it, the shared engine is idle and holds no page."""
    yield
    if "llm" in request.fixturenames:
        assert_idle(request.getfixturevalue("llm"))


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.allocator.num_free == llm.engine.num_pages


def text_of(output) -> str:
    return output.outputs[0].text


def ids_of(output) -> list[int]:
    return output.outputs[0].token_ids


# What goes in


def test_prompts_come_in_four_forms(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], [PROMPTS[0]], ids, [ids], np.array(ids), {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]]
    results = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(r) == 1 and r[0].prompt_token_ids == ids for r in results)
    assert len({tuple(ids_of(r[0])) for r in results}) == 1
    assert results[0][0].prompt == PROMPTS[0]
    assert results[2][0].prompt is None


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """More prompts than rows, and lengths that make them finish out of order."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 3, 11, 1, 7)]
    outputs = llm.generate(PROMPTS, params)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(ids_of(o)) for o in outputs] == [20, 3, 11, 1, 7]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        alone = llm.generate(prompt, GREEDY)[0]
        assert ids_of(output) == ids_of(alone)[: len(ids_of(output))]


def test_text_is_the_decoded_output(llm):
    for output in llm.generate(PROMPTS, GREEDY):
        assert text_of(output) == llm.tokenizer.decode(ids_of(output), skip_special_tokens=True)


def test_chat_template_adds_no_second_bos(llm):
    message = [{"role": "user", "content": "hello"}]
    prompt = llm.render_chat(message)
    assert prompt["prompt_token_ids"].count(BOS) == 1
    assert prompt["prompt"] == "<s><user>hello<bot>"
    answers = llm.chat([message, message], GREEDY)
    assert [a.prompt_token_ids for a in answers] == [prompt["prompt_token_ids"]] * 2
    assert ids_of(llm.chat(message, GREEDY)[0]) == ids_of(answers[0])
    assert llm.tokenizer.encode("hello").count(BOS) == 1  # a plain prompt gets its one from the tokenizer


def test_no_chat_template(tmp_path):
    llm = LLM(str(write_model(tmp_path / "m", chat=False)), num_pages=4)
    with pytest.raises(ValueError, match="no chat template: use generate"):
        llm.chat([{"role": "user", "content": "hello"}])


# Where it ends


def stop_string(llm, tokens: slice, prompt: str = PROMPTS[3]) -> tuple[str, str, list[int]]:
    """(a string from inside of the greedy answer, that answer, its ids): from the middle of the first of these tokens
    to the middle of the last."""
    output = llm.generate(prompt, GREEDY)[0]
    decode = llm.tokenizer.decode
    start, end = len(decode(ids_of(output)[: tokens.start])), len(decode(ids_of(output)[: tokens.stop]))
    return text_of(output)[start:end], text_of(output), ids_of(output)


@pytest.mark.parametrize("include", [False, True])
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


# Streams


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
def test_a_stream_never_shows_the_beginning_of_a_stop_string(llm, include):
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


def test_a_stream_takes_one_prompt(llm):
    with pytest.raises(ValueError, match="one prompt, got 2: use generate"):
        llm.stream(PROMPTS[:2])


# What is refused, and what stays usable


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 1: the prompt is empty"),
        ([5, 320], r"prompt 1: token id 320 is outside the vocabulary 0\.\.319"),
        ([5, -1], "prompt 1: token id -1 is outside"),
        ([5] * 512, "prompt 1: the prompt has 512 tokens, max_model_len=512 leaves no room"),
        ([1.5], "prompt 1: token ids must be whole numbers"),
        ({"promt": "x"}, "prompt 1: .*'promt'.* is no prompt"),
        (None, "prompt 1: None is no prompt"),
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
    with pytest.raises(ValueError, match=r"prompt 1: a request of .* pages of 16, the pool has 3: lower max_tokens"):
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


def test_later_fields_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"repetition_penalty=1\.1 is not supported yet"):
        SamplingParams(repetition_penalty=1.1)
    with pytest.raises(NotImplementedError, match="'block' is not supported yet: use one of standard, coupled"):
        SpeculativeConfig(rejection_sample_method="block")


def test_a_draft_with_another_tokenizer(folder, tmp_path):
    draft = write_model(tmp_path / "foreign", text="entirely different words make entirely different merges " * 3)
    with pytest.raises(ValueError, match="the draft 'foreign' has another tokenizer than the target 'target'"):
        LLM(str(folder), speculative_config={"model": str(draft)})


def test_an_interrupt_between_steps_leaves_the_engine_usable(llm, monkeypatch):
    expected = ids_of(llm.generate(PROMPTS[0], GREEDY)[0])
    step, calls = llm.engine.step, itertools.count()

    def interrupted(*args, **kwargs):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_idle(llm)
    monkeypatch.undo()
    assert ids_of(llm.generate(PROMPTS[0], GREEDY)[0]) == expected


# What comes out beside the text


def test_metrics_per_request_and_in_total(llm):
    before = json.loads(json.dumps(llm.metrics.as_dict()))
    outputs = llm.generate(PROMPTS[:3], GREEDY)
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        gained = llm.metrics.as_dict()[name] - before[name]
        assert gained == sum(getattr(o.metrics, name) for o in outputs)
        assert gained > 0
    for output in outputs:
        m = output.metrics
        assert m.num_emitted_tokens == 24
        assert len(m.num_accepted_tokens_per_pos) == 3
        assert m.num_accepted_tokens_per_pos == sorted(m.num_accepted_tokens_per_pos, reverse=True)
        assert m.mean_acceptance_length == pytest.approx(1 + m.num_accepted_tokens / m.num_drafts)
    assert llm.timing.tokens_per_second > 0


def test_per_prompt_params_and_the_off_switch(llm):
    """Greedy, seeded, and plain by num_speculative_tokens=0, in one batch: each equals its own run alone."""
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, num_speculative_tokens=0),
    ]
    together = llm.generate([PROMPTS[0]] * 3, params)
    assert [ids_of(o) for o in together] == [ids_of(llm.generate([PROMPTS[0]] * 2, p)[0]) for p in params]
    assert ids_of(together[0]) == ids_of(together[2])
    assert together[2].metrics.num_drafts == 0
    assert together[2].metrics.mean_acceptance_length == 1.0


def test_ngram_equals_plain(folder):
    """With a config object in place of the dict."""
    ngram = LLM(str(folder), speculative_config=SpeculativeConfig(method="ngram"), max_num_seqs=4, num_pages=64)
    prompts = [p + " " + p + " " + p for p in PROMPTS[:4]]
    plain = [SamplingParams(temperature=0.0, max_tokens=24, num_speculative_tokens=0)] * 4
    fast = [SamplingParams(temperature=0.0, max_tokens=24)] * 4
    assert [ids_of(o) for o in ngram.generate(prompts, fast)] == [ids_of(o) for o in ngram.generate(prompts, plain)]
    assert ngram.metrics.num_draft_tokens > 0


def test_the_one_call_form(llm, folder):
    output = jaxspec.generate(
        str(folder), PROMPTS[0], assistant_model=str(folder), num_assistant_tokens=3, temperature=0.0, max_tokens=6
    )[0]
    assert ids_of(output) == ids_of(llm.generate(PROMPTS[0], GREEDY)[0])[:6]
    assert output.metrics.num_drafts > 0
    with pytest.raises(ValueError, match="num_assistant_tokens=3 needs assistant_model"):
        jaxspec.generate(str(folder), "x", num_assistant_tokens=3)
    with pytest.raises(ValueError, match="did you mean 'max_tokens'"):
        jaxspec.generate(str(folder), "x", max_new_tokens=3)

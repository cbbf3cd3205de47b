"""LLM: text and token ids in, outputs in order, streams, stop strings, errors that name what is wrong."""

from __future__ import annotations

import io
import itertools
import json
import re
import time

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams, SpecDecodeMetrics, SpeculativeConfig
from jaxspec.progress import generation_progress
from tests.folders import BOS, EOS, write_model

PROMPTS = ["The quick brown fox", "Count the words: one, two,", "dog dog dog", "def total(items):", "Über-strong"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def llm(folder):
    """The target drafts for itself: nearly every round accepts all K drafts, so stops fall into accepted runs."""
    speculative = {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
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


def test_another_way_of_speculating_shares_the_weights(llm, folder):
    other = llm.speculating({"method": "ngram", "num_speculative_tokens": 2})
    mine, theirs = llm.engine.params["target"], other.engine.params["target"]
    assert all(mine[name] is theirs[name] for name in mine)
    assert (llm.engine.num_drafts, other.engine.num_drafts) == (3, 2)
    before = llm.metrics.num_emitted_tokens
    found = other.generate(PROMPTS[:2], GREEDY, progress=False)
    assert llm.metrics.num_emitted_tokens == before
    assert other.metrics.num_emitted_tokens == 48
    assert list(map(ids_of, found)) == list(map(ids_of, llm.generate(PROMPTS[:2], GREEDY, progress=False)))
    other.observers.append(print)
    assert not llm.observers
    assert llm.speculating(None).engine.num_drafts == 0


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


# Samples


def test_n_samples(llm):
    """More than there are rows. Sample 0 is what n = 1 gives; the counters are those of all."""
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    before = llm.metrics.num_emitted_tokens
    output, other = llm.generate(PROMPTS[:2], SamplingParams(n=6, **params))
    assert llm.metrics.num_emitted_tokens - before == 2 * 6 * 12
    for o in (output, other):
        assert [c.index for c in o.outputs] == list(range(6))
        assert len({tuple(c.token_ids) for c in o.outputs}) == 6
        assert all(c.text == llm.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in o.outputs)
        assert o.metrics.num_emitted_tokens == 6 * 12
        assert o.metrics.num_draft_tokens >= 6 * 12 * 3 / 4
    assert ids_of(output) == ids_of(llm.generate(PROMPTS[0], SamplingParams(**params))[0])
    assert [c.token_ids for c in llm.generate(PROMPTS[0], SamplingParams(n=6, **params))[0].outputs] == [
        c.token_ids for c in output.outputs
    ]


def test_samples_stop_each_for_itself(llm):
    params = {"n": 4, "temperature": 1.0, "seed": 2, "max_tokens": 24, "ignore_eos": True}
    whole = llm.generate(PROMPTS[2], SamplingParams(**params))[0].outputs
    stop = whole[1].text[2:5]
    cut = llm.generate(PROMPTS[2], SamplingParams(**params, stop=stop))[0].outputs
    for full, short in zip(whole, cut, strict=True):
        assert short.text == full.text.split(stop)[0]
        assert short.stop_reason == (stop if stop in full.text else None)
    assert {c.finish_reason for c in cut} == {"stop", "length"}


def test_greedy_samples_are_alike(llm):
    output = llm.generate(PROMPTS[0], SamplingParams(n=2, temperature=0.0, max_tokens=8))[0]
    assert output.outputs[0].token_ids == output.outputs[1].token_ids


# Log-probabilities


def table_of(llm, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] of what follows each token, from one pass over all of them."""
    import jax

    from tests.models.forward import run

    logits = run(llm.engine.decoding.target.config, llm.engine.params["target"], np.array([tokens]), [len(tokens)])
    return np.asarray(jax.nn.log_softmax(logits[0]))


def check_logprobs(llm, entries, ids: list[int], table: np.ndarray, most: int) -> None:
    assert len(entries) == len(ids)
    for entry, chosen, row in zip(entries, ids, table, strict=True):
        assert next(iter(entry)) == chosen
        best = np.argsort(-row, kind="stable")[:most].tolist()
        assert set(entry) == {chosen, *best}
        for i, found in entry.items():
            assert found.logprob == pytest.approx(row[i], abs=1e-4)
            assert found.rank == 1 + int(np.sum(row > row[i]))
            assert found.decoded_token == llm.tokenizer.decode([i])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_targets_raw_logits(llm, temperature):
    """Whatever the temperature and the filters, of accepted drafts and of the target's own tokens."""
    params = SamplingParams(
        n=2, temperature=temperature, top_k=20, seed=1, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    output = llm.generate(PROMPTS[1], params)[0]
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        table = table_of(llm, prompt + completion.token_ids)[len(prompt) - 1 : -1]
        check_logprobs(llm, completion.logprobs, completion.token_ids, table, 3)
        chosen = [entry[i].logprob for i, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None
    check_logprobs(llm, output.prompt_logprobs[1:], prompt[1:], table_of(llm, prompt)[:-1], 1)


def test_logprobs_of_the_chosen_token_alone_and_of_none(llm):
    short = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    alone = llm.generate(PROMPTS[0], SamplingParams(**short, logprobs=0))[0]
    assert [list(entry) for entry in alone.outputs[0].logprobs] == [[i] for i in ids_of(alone)]
    assert alone.prompt_logprobs is None
    none = llm.generate(PROMPTS[0], SamplingParams(**short))[0]
    assert (none.outputs[0].logprobs, none.outputs[0].cumulative_logprob) == (None, None)


def test_logprobs_end_with_the_stop_string(llm):
    stop, _, _ = stop_string(llm, slice(6, 8))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop, logprobs=1)
    output = llm.generate(PROMPTS[3], params)[0]
    assert 0 < len(ids_of(output)) < 24
    assert [next(iter(entry)) for entry in output.outputs[0].logprobs] == ids_of(output)


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


def test_a_draft_with_another_tokenizer(folder, tmp_path):
    draft = write_model(tmp_path / "foreign", text="entirely different words make entirely different merges " * 3)
    with pytest.raises(ValueError, match="the draft 'foreign' has another tokenizer than the target 'target'"):
        LLM(str(folder), speculative_config={"model": str(draft)})


@pytest.mark.parametrize("n", [1, 3])
def test_an_interrupt_between_steps_leaves_the_engine_usable(llm, monkeypatch, n):
    params = SamplingParams(n=n, temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = ids_of(llm.generate(PROMPTS[0], params)[0])
    step, calls = llm.engine.step, itertools.count()

    def interrupted(*args, **kwargs):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, params)
    assert_idle(llm)
    monkeypatch.undo()
    assert ids_of(llm.generate(PROMPTS[0], params)[0]) == expected


def failing(llm, monkeypatch, prompt: str) -> None:
    """From now on the second launch of this prompt's requests fails."""
    ids, step = llm.tokenizer.encode(prompt), llm.engine.step

    def failing_step(streaming):
        ran = step(streaming=streaming)
        for request in ran:
            if request.prompt == ids and request.finish_reason is None:
                llm.engine.abort(request)
                request.finish_reason, request.error = "error", "the launch failed: out of memory"
        return ran

    monkeypatch.setattr(llm.engine, "step", failing_step)


def test_a_request_that_fails_is_returned_with_its_error(llm, monkeypatch):
    expected = llm.generate(PROMPTS[:3], GREEDY)
    failing(llm, monkeypatch, PROMPTS[1])
    with pytest.warns(RuntimeWarning, match="^1 of 3 completions ended with an error, the first: the launch failed: "):
        outputs = llm.generate(PROMPTS[:3], GREEDY)
    for i in (0, 2):
        assert ids_of(outputs[i]) == ids_of(expected[i])
        assert (outputs[i].outputs[0].finish_reason, outputs[i].outputs[0].error) == ("length", None)
    failed = outputs[1].outputs[0]
    assert (failed.finish_reason, failed.error) == ("error", "the launch failed: out of memory")
    assert failed.token_ids == ids_of(expected[1])[: len(failed.token_ids)]
    last = list(llm.stream(PROMPTS[1], GREEDY))[-1]
    assert (last.finish_reason, last.error) == ("error", "the launch failed: out of memory")


def test_bad_words_reach_the_engine_as_ids(llm, monkeypatch):
    checked, added, check, add = [], [], llm.engine.check, llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda *args, **how: added.append(how["bad_words"]) or add(*args, **how))
    llm.generate(PROMPTS[:2], [SamplingParams(bad_words=["dog"], max_tokens=2), GREEDY])
    monkeypatch.setattr(llm.engine, "check", lambda ids, params, words=(): checked.append(words) or check(ids, params))
    llm.prepare(PROMPTS[:2], [SamplingParams(bad_words=["dog"], max_tokens=2), GREEDY])
    assert checked == added
    assert checked[0][0] == tuple(llm.tokenizer.encode("dog", add_special_tokens=False))
    assert checked[1] == ()
    with pytest.raises(ValueError, match="prompt 1: bad_words: ' ' has no tokens"):
        llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(bad_words=" ")])


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


def test_timing_of_a_request(llm):
    """More requests than rows: the last ones wait. The parts add up to the whole."""
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS * 2, GREEDY)
    wall = time.perf_counter() - started
    for output in outputs:
        t = output.timing
        assert 0 <= t.queue_seconds <= t.queue_seconds + t.prefill_seconds <= t.time_to_first_token <= wall
        whole = t.queue_seconds + t.prefill_seconds + t.decode_seconds
        assert whole <= wall
        assert t.time_per_output_token * 23 == pytest.approx(whole - t.time_to_first_token)
    assert outputs[-1].timing.queue_seconds > 2 * outputs[0].timing.queue_seconds
    one = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))[0].timing
    assert one.time_to_first_token > 0
    assert one.time_per_output_token is None


def test_timing_lasts_until_the_last_sample(llm, monkeypatch):
    """Nine samples on four rows: the first ones are over when the last begins."""
    heard = []
    monkeypatch.setattr(llm, "observers", [heard.append])
    timing = llm.generate(PROMPTS[0], SamplingParams(n=9, max_tokens=24, ignore_eos=True))[0].timing
    times = [r.times for r in heard]
    assert len(times) == 9
    first, last = min(times, key=lambda t: t.admitted), max(times, key=lambda t: t.finished)
    assert first.finished < last.admitted
    assert timing.decode_seconds == last.finished - first.prefilled
    assert timing.queue_seconds == first.admitted - first.arrived
    assert timing.time_per_output_token == (last.finished - min(t.first_token for t in times)) / 23


def test_observers_hear_of_every_sample_once(llm, monkeypatch):
    heard = []
    monkeypatch.setattr(llm, "observers", [heard.append])
    llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=4, ignore_eos=True))
    pieces = llm.stream(PROMPTS[0], GREEDY)
    next(pieces)
    pieces.close()
    assert [r.finish_reason for r in heard] == ["length"] * 10 + ["abort"]
    assert len(set(heard)) == 11


def test_hundreds_of_prompts_come_back_in_order(llm):
    """Each with its own seed, so that no two answers are alike by chance."""
    prompts = [[5 + i % 300, 5 + i // 7] for i in range(400)]
    params = [SamplingParams(seed=i, max_tokens=1 + i % 3, ignore_eos=True) for i in range(400)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(ids_of(o)) for o in outputs] == [p.max_tokens for p in params]
    for i in (0, 57, 399):
        assert ids_of(outputs[i]) == ids_of(llm.generate([prompts[i]], params[i])[0])


def test_progress_shows_running_totals(monkeypatch):
    """On a terminal only; what a report costs does not depend on how many requests there are."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    metrics = SpecDecodeMetrics(num_emitted_tokens=1000)
    with generation_progress(5000, metrics, enabled=True) as report:
        metrics += SpecDecodeMetrics(2, 8, [2, 1], 5)
        report(17)
    shown = terminal.getvalue()
    assert "17/5000" in shown
    assert "acceptance length 2.50" in shown
    speed = float(re.findall(r"([\d.]+) tokens/s", shown)[-1])
    assert speed > 0
    terminal.truncate(0)
    with generation_progress(5000, metrics, enabled=False) as report:
        report(17)
    assert not terminal.getvalue()


def test_a_profile(llm, tmp_path):
    assert llm.start_profile(tmp_path / "trace") == tmp_path / "trace"
    with pytest.raises(RuntimeError, match=r"a profile is being taken already, into .*trace: stop_profile\(\) ends it"):
        llm.start_profile()
    llm.generate(PROMPTS[0], GREEDY)
    assert llm.stop_profile() == tmp_path / "trace"
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError, match=r"no profile is being taken: start_profile\(\) begins one"):
        llm.stop_profile()


def test_a_profiles_own_folder(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    folder = llm.start_profile()
    llm.stop_profile()
    assert folder.parent == tmp_path / "profiles"
    assert list(folder.rglob("*.xplane.pb"))


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

"""Whatever is asked for, the output obeys it and is what plain decoding gives under the same parameters."""

from __future__ import annotations

import pytest

from jaxspec.engine.request import Request
from jaxspec.engine.results import NO_ID_ALLOWED
from jaxspec.options.sampling_params import SamplingParams
from tests.support import grammars
from tests.support.lively_models import FAMILY, VOCAB, new_engine, params, serve, texts, total
from tests.support.sampling_wishes import END, LONG, METHODS, PROMPTS, batch, expected, found, plain, speculative
from tests.support.sizes import cases


@cases(("method", "k"), METHODS, quick=[("noisy", 4)])
def test_equals_plain(method, k):
    rows, there, here = batch(FAMILY[method]), expected(FAMILY[method]), found(method, k)
    for row in rows:
        assert here[row.name].output == there[row.name].output, row.name
        assert here[row.name].finish_reason == there[row.name].finish_reason, row.name
    assert sum(total(list(here.values()))) > 0
    if method in ("noisy", "itself"):
        for row in rows:  # the draft knows of all this too, and stays right
            if row.sampling.num_speculative_tokens != 0:
                assert here[row.name].metrics.num_accepted_tokens > 0, row.name


def occurs(word: tuple[int, ...], output: list[int]) -> bool:
    return any(tuple(output[i : i + len(word)]) == word for i in range(len(output)))


@cases("family", ["llama", "loops"], quick=["llama"])
def test_each_does_what_it_says(family):
    answers, rows = expected(family), batch(family)
    free = {kind: {} for kind in ("greedy", "seeded")}
    for kind in free:
        how = next(r.sampling for r in rows if r.name == f"{kind}: nothing")
        base = [
            SamplingParams(max_tokens=LONG, temperature=how.temperature, top_k=how.top_k, seed=40 + i) for i in range(3)
        ]
        free[kind] = dict(zip(PROMPTS, texts(serve(plain(family), PROMPTS, base)), strict=True))
    same = []
    for row in rows:
        (kind, name), output, p = row.name.split(": "), answers[row.name].output, row.sampling
        if output == free[kind][row.prompt]:
            same.append(name)
        assert not any(occurs(word, output) for word in row.words), row.name
        assert set(output) <= set(p.allowed_token_ids or range(VOCAB)), row.name
        assert len(output) >= p.min_tokens
        assert not set(output[: p.min_tokens - 1] if p.min_tokens else output[:-1]) & set(p.stop_token_ids), row.name
        assert row.automaton is None or grammars.obeys(row.automaton, output), row.name
        ends = (*p.stop_token_ids, *(END if row.automaton else ()))
        assert (answers[row.name].finish_reason == "stop") == (output[-1] in ends)
    assert set(same) <= {"nothing", "rewarded repetition"}
    assert same.count("nothing") == 2


@pytest.mark.thorough
def test_ignore_eos_and_min_tokens():
    """The model's own end ids are held back below min_tokens, and are ids like others where they are ignored."""
    free = serve(plain("llama"), PROMPTS, params((LONG,) * 3))[1].output
    eos = (free[1], free[4])
    wishes = [{}, {"ignore_eos": True}, {"min_tokens": 6}, {"min_tokens": 6, "ignore_eos": True}]
    sampling = [params(LONG, **wish)[0] for wish in wishes]
    there, here = (
        serve(e, [PROMPTS[1]] * 4, sampling, stop_ids=eos) for e in (plain("llama"), speculative("noisy", 4))
    )
    assert texts(here) == texts(there)
    outputs = texts(there)
    assert outputs[0] == free[: min(free.index(i) for i in eos) + 1]
    assert outputs[1] == outputs[3] == free
    assert not set(outputs[2][:5]) & set(eos)
    assert len(outputs[2]) >= 6


@cases("method", ["noisy", "ngram"], rest=["noisy"])
def test_samples(method):
    """Samples differ, are what they were when asked again, and the first is that of n=1; as in plain decoding."""
    how = {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "logit_bias": {3: 1.0}, "min_tokens": 3}
    one, three = (SamplingParams(n=n, max_tokens=12, **how) for n in (1, 3))
    family = FAMILY[method]
    seen = []
    for engine in (plain(family), speculative(method, 4), speculative(method, 4)):
        first, alone, _ = serve(engine, (PROMPTS[1], PROMPTS[1], PROMPTS[0]), (three, one, one))
        samples = [s.output for s in first.samples]
        assert len({tuple(s) for s in samples}) == 3
        assert samples[0] == alone.output
        seen.append(samples)
    assert seen[0] == seen[1] == seen[2]


def blocked(engine, company: SamplingParams) -> list[Request]:
    """Rows that run out of ids: at once, after min_tokens' worth of one id, after a bad word; the last does not."""
    at_once = params(9, allowed_token_ids=[4, 5], stop_token_ids=[4, 5], min_tokens=3)[0]
    later = params(9, allowed_token_ids=[4, 5])[0]
    bad = params(9, allowed_token_ids=[4, 5], stop_token_ids=[5], min_tokens=5)[0]
    words = [(), ((4, 4), (4, 5), (5, 4), (5, 5)), ((4, 4, 4),), ()]
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[2])
    return serve(engine, prompts, [at_once, later, bad, company], bad_words=words)


@cases("temperature", [0.0, 0.8], quick=[0.8])
@cases(("method", "k"), [("plain", 0), ("noisy", 4), ("ngram", 4), ("combined", 4)], quick=[("noisy", 4)])
def test_a_row_without_any_allowed_id_ends_with_an_error(method, k, temperature):
    """It keeps what it has said; the others of its batch know nothing of it."""
    engine = plain("llama") if method == "plain" else speculative(method, k)
    company = SamplingParams(max_tokens=9, temperature=temperature, presence_penalty=1.0, seed=5)
    requests = blocked(engine, company)
    assert [r.finish_reason for r in requests] == ["error", "error", "error", "length"]
    assert [r.error for r in requests] == [NO_ID_ALLOWED] * 3 + [None]
    assert [len(r.output) for r in requests] == [0, 1, 2, 9]
    assert requests[2].output == [4, 4]
    family = "llama" if method == "plain" else FAMILY[method]
    (alone, _) = serve(plain(family), (PROMPTS[2],) * 2, (company,) * 2)
    assert requests[3].output == alone.output


@pytest.mark.thorough
def test_a_draft_that_has_none_of_the_allowed_ids():
    """Its q is nothing at all, and must not become the target's p; under the standard rule too."""
    lacking = new_engine("fewer_ids", 3, spec={"rejection_sample_method": "standard"})
    ids = [VOCAB - 1, VOCAB - 2, VOCAB - 3]
    sampling = [SamplingParams(max_tokens=16, seed=i, allowed_token_ids=ids) for i in range(3)]
    requests = serve(lacking, PROMPTS, sampling)
    assert [r.finish_reason for r in requests] == ["length"] * 3
    assert {i for r in requests for i in r.output} == set(ids)

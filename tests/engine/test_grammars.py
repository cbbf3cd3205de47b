"""Requests with a grammar through the engine: their tokens are legal, and those of plain decoding under the mask."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.engine.engine import Engine
from jaxspec.options.sampling_params import SamplingParams
from tests.drafters.test_trees import TREE
from tests.engine.test_faults import break_once, finish
from tests.support import grammars, lively_heads
from tests.support.lively_models import FAMILY, PROMPTS, VOCAB, new_engine, params, serve, texts
from tests.support.sizes import cases

K = 4
LONG = 20
ENDS = (0, 50)
LOOSE, TIGHT, SHORT = (
    grammars.random(VOCAB, 9, seed=1, ends=ENDS, legal=0.4),
    grammars.random(VOCAB, 40, seed=2, ends=ENDS, legal=0.1),
    grammars.of_states(VOCAB, [{3: 1, 5: 1}, {7: 2, 9: 0}, {4: 3}, {0: 4, 50: 4}], ENDS),
)
AUTOMATA = (LOOSE, TIGHT, SHORT, None, grammars.anything(VOCAB, ENDS))
SAMPLING = {
    "greedy": params((LONG,) * 5),
    "seeded": [SamplingParams(max_tokens=LONG, seed=70 + i, temperature=0.9, top_p=0.95) for i in range(5)],
}
BATCH = [*SAMPLING["greedy"], *SAMPLING["seeded"]]


def served(engine: Engine, **how) -> list:
    """Greedy and seeded rows with every automaton, in one batch."""
    return serve(engine, PROMPTS * 2, BATCH, stop_ids=ENDS, automata=AUTOMATA * 2, **how)


def one_shape(engine: Engine) -> Engine:
    """Compiling takes longest by far."""
    engine.grown_shape = lambda *requests: (16, 16)  # type: ignore[method-assign]
    return engine


@functools.cache
def plain(family: str = "llama") -> Engine:
    return one_shape(new_engine("plain", 0, family, max_num_seqs=16))


@functools.cache
def expected(family: str = "llama") -> list[tuple]:
    return [(r.output, r.finish_reason) for r in served(plain(family))]


def found(requests) -> list[tuple]:
    return [(r.output, r.finish_reason) for r in requests]


@cases("kind", ["greedy", "seeded"], quick=["seeded"])
def test_each_token_is_that_of_the_masked_distribution(kind):
    """A request of its own for each token, which allows the ids that the automaton does. Its noise is that of the
    token's position, so that a seeded token is the same, too."""
    engine = plain()
    outputs = expected()[:5] if kind == "greedy" else expected()[5:]
    free = texts(serve(engine, PROMPTS, SAMPLING[kind], stop_ids=ENDS))
    for prompt, automaton, sampling, (output, reason), without in zip(
        PROMPTS, AUTOMATA, SAMPLING[kind], outputs, free, strict=True
    ):
        if automaton is None:
            assert output == without
            continue
        assert grammars.obeys(automaton, output)
        assert (reason == "stop") == (output[-1] in ENDS) == (automaton.advance(0, output) == automaton.end)
        assert reason == "stop" or len(output) == LONG
        if automaton is AUTOMATA[-1]:
            assert output == without, "it forbids nothing"
        for i in (0, 1, 2, len(output) - 1):
            legal = automaton.legal(automaton.advance(0, output[:i])).nonzero()[0].tolist()
            own = SamplingParams(**vars(sampling) | {"max_tokens": 1, "allowed_token_ids": legal})
            (request, _) = serve(engine, [(*prompt, *output[:i])] * 2, [own] * 2, stop_ids=ENDS)
            assert request.output == output[i : i + 1]


ENGINES = {
    "noisy": lambda: speculative(),
    "greedy drafts": lambda: new_engine("noisy", K, spec={"draft_sample_method": "greedy"}),
    "reduced": lambda: new_engine("reduced", K),
    "wrong": lambda: new_engine("wrong", 2),
    "ngram": lambda: new_engine("ngram", K, "loops"),
    "combined": lambda: new_engine("combined", K, "loops"),
    "suffix": lambda: new_engine("ngram", K, "loops", spec={"method": "suffix", "adaptive": False}),
    "tree": lambda: new_engine("noisy", K, spec={**TREE, "adaptive": False}),
    **{kind: functools.partial(lively_heads.engine, kind, K) for kind in lively_heads.KINDS},
}
RULES = ("standard", "block", "coupled")


@cases("name", ENGINES, quick=["noisy", "tree"], rest=["ngram", "dflash"])
def test_every_drafter_gives_plain_decodings_tokens(name):
    engine, family = ENGINES[name](), (FAMILY | {"suffix": "loops"}).get(name, "llama")
    for rounds in (None, 3):
        requests = served(engine, rounds=rounds)
        assert found(requests) == expected(family), f"{rounds} rounds a launch"
    drafted = [r.metrics.num_accepted_tokens for r in requests]
    if name in ("noisy", "tree"):  # the draft knows of the grammar, and stays right
        assert min(n for n, r in zip(drafted, requests, strict=True) if len(r.output) > K) > 0


@cases("rule", RULES, rest=["block", "coupled"])
def test_every_rule_obeys(rule):
    """Without a seed, where tokens are left to chance."""
    engine = new_engine("noisy", K, spec={"rejection_sample_method": rule})
    automata = (LOOSE, TIGHT, SHORT, LOOSE, TIGHT)
    requests = serve(engine, PROMPTS, [SamplingParams(max_tokens=40)] * 5, stop_ids=ENDS, automata=automata)
    for request, automaton in zip(requests, automata, strict=True):
        assert grammars.obeys(automaton, request.output)
        assert (request.finish_reason == "stop") == (automaton.advance(0, request.output) == automaton.end)
    assert sum(r.metrics.num_accepted_tokens for r in requests) > 0


@pytest.mark.thorough
def test_few_pages_samples_and_prefixes():
    """Rows are put back and read again, samples part from each other, prompts are known: a state goes with its text."""
    sampling = SamplingParams(max_tokens=LONG, n=3, seed=5, temperature=0.9)
    engine = one_shape(new_engine("noisy", K, page_size=4, num_pages=22, max_num_seqs=4))
    requests = served(engine, rounds=2)
    assert found(requests) == expected()
    assert engine.scheduler.num_preemptions > 0
    (samples,) = serve(engine, [PROMPTS[2]], [sampling], automata=[LOOSE], rounds=2)
    (others,) = serve(plain(), [PROMPTS[2]], [sampling], automata=[LOOSE])
    assert [s.output for s in samples.samples] == [s.output for s in others.samples]
    assert len({tuple(s.output) for s in samples.samples}) == 3
    assert all(grammars.obeys(LOOSE, s.output) for s in samples.samples)


# Ends


def test_the_text_ends_where_the_grammar_does():
    """With ignore_eos, too, and not before: SHORT is over after an even number of tokens, at the least four."""
    wanted = [{}, {"ignore_eos": True}, {"temperature": 0.9, "seed": 1}, {"stop_token_ids": [7]}]
    sampling = [params(LONG, **each)[0] for each in wanted]
    for engine in (plain(), speculative()):
        requests = serve(engine, [PROMPTS[1]] * 4, sampling, stop_ids=(50,), automata=[SHORT] * 4)
        assert [r.finish_reason for r in requests] == ["stop"] * 4
        for request in requests[:3]:
            assert request.output[-1] in ENDS
            assert SHORT.advance(0, request.output) == SHORT.end == request.grammar_state
        assert requests[3].output[-1] == 7, "what the caller names ends it as ever"
        assert requests[0].output == requests[1].output


@functools.cache
def speculative() -> Engine:
    return one_shape(new_engine("noisy", K, max_num_seqs=16))


CONFLICTS = [
    (
        {"min_tokens": 9, "allowed_token_ids": [3, 7, 4, 0]},
        (),
        3,
        "structured_outputs and allowed_token_ids and min_tokens",
    ),
    ({"allowed_token_ids": [9, 1]}, (), 0, "structured_outputs and allowed_token_ids"),
    ({"allowed_token_ids": [3, 7, 4]}, ((7, 4),), 2, "structured_outputs and allowed_token_ids and bad_words"),
    ({"min_tokens": 9, "logit_bias": {9: -100.0}}, (), 3, "structured_outputs and min_tokens"),
    ({"logit_bias": {5: -100.0, 9: -100.0}}, ((4, 0), (4, 50)), 3, "structured_outputs and bad_words"),
]


@cases("temperature", [0.0, 0.8], quick=[0.8])
def test_a_conflict_ends_its_own_row_with_a_line(temperature):
    """It keeps what it has said; the others of its batch know nothing of it."""
    dead_end = grammars.of_states(VOCAB, [{3: 1}, {}], ENDS)
    how = {"temperature": temperature, "seed": 3}
    sampling = [params(LONG, **how, **options)[0] for options, *_ in CONFLICTS] + params((LONG, LONG), **how)
    words = [words for _, words, *_ in CONFLICTS] + [()] * 2
    automata = [SHORT] * len(CONFLICTS) + [dead_end, LOOSE]
    prompts = [PROMPTS[3]] * len(automata)
    for engine in (plain(), speculative()):
        *failed, dead, neighbour = serve(engine, prompts, sampling, bad_words=words, automata=automata)
        for request, (_, _, length, names) in zip(failed, CONFLICTS, strict=True):
            line = f"no token id was allowed: {names} together forbid every one; relax one of them"
            assert (request.finish_reason, request.error, len(request.output)) == ("error", line, length)
        line = "no token id was allowed: the grammar allows none after this text; correct structured_outputs"
        assert (dead.finish_reason, dead.error, dead.output) == ("error", line, [3])
        alone, _ = serve(plain(), [PROMPTS[3]] * 2, sampling[-1:] * 2, automata=[LOOSE] * 2)
        assert found([neighbour]) == found([alone])


# The pool


def several(count: int, seed: int) -> list:
    return [grammars.random(VOCAB, 9, seed + i, ENDS, legal=0.4) for i in range(count)]


def test_more_grammars_than_there_is_room_for():
    """Four fit. Each request gets its own, whether its table was there, was evicted, or had to wait for room."""
    engine = one_shape(new_engine("noisy", K, grammar_pool_mib=1))
    prompts, sampling = [PROMPTS[1]] * 8, params((LONG,) * 8)
    for seed in (20, 40):
        automata = several(5, seed) + several(3, seed)
        requests = [engine.add(p, s, automaton=a) for p, s, a in zip(prompts, sampling, automata, strict=True)]
        engine.step(1)
        assert [len(r.pages) > 0 for r in requests] == [True] * 4 + [False] * 4
        while engine.busy:
            engine.step(1)
        assert found(requests) == found(serve(plain(), prompts, sampling, automata=automata))
        assert len({tuple(r.output) for r in requests}) == 5
    compiled = [name for name, *_ in engine.runner.programs.compiled]
    assert [compiled.count(name) for name in ("launch", "write_grammar")] == [1, 1], "none for a new grammar"


def test_a_grammar_that_never_fits_is_refused():
    large = grammars.of_states(VOCAB, [{(i + 1) % VOCAB: i + 1} for i in range(20_000)], ENDS)
    engine = new_engine(grammar_pool_mib=1)
    with pytest.raises(UserError, match=r"the grammar's table takes 2\.5 MiB, the pool of all grammars has 1"):
        engine.add(PROMPTS[0], SAMPLING["greedy"][0], automaton=large)
    assert not engine.busy


@pytest.mark.parametrize("program", ["write_grammar", "launch"])
def test_tables_are_written_again_where_they_were_lost(program, monkeypatch):
    """Who took part in what failed ends with the error, and the others go on as if nothing had been."""
    engine = speculative()
    first = engine.add(PROMPTS[2], SAMPLING["seeded"][2], automaton=SHORT, stop_ids=ENDS)
    engine.step(1)
    break_once(engine, monkeypatch, program, RuntimeError("lost"), donated=True)
    (new,) = several(1, 80 + len(program))  # its table is not there yet
    second = engine.add(PROMPTS[0], SAMPLING["seeded"][0], automaton=new, stop_ids=ENDS)
    finish(engine)
    third = engine.add(PROMPTS[2], SAMPLING["seeded"][2], automaton=SHORT, stop_ids=ENDS)
    finish(engine)
    assert second.error == "RuntimeError: lost"
    assert found([third]) == expected()[7:8]
    assert found([first]) == expected()[7:8] if program == "write_grammar" else first.error == second.error


def test_other_processes_have_the_same_tables():
    """They execute the plans that the first one sends."""
    first, other = new_engine(grammar_pool_mib=1), new_engine(grammar_pool_mib=1)
    first.runner.peers = SimpleNamespace(send_plan=other.runner.execute, together=contextlib.nullcontext)
    request = first.add(PROMPTS[2], SAMPLING["greedy"][2], automaton=SHORT)
    finish(first)
    assert request.output == expected()[2][0]
    np.testing.assert_array_equal(first.runner.grammars, other.runner.grammars)
    np.testing.assert_array_equal(first.runner.grammars[:VOCAB], SHORT.classes)
    first.runner.renew()
    assert other.runner.grammars is None


def test_nothing_is_paid_without_a_grammar():
    """No table is on the device, and no program reads one."""
    engine = new_engine()
    serve(engine, PROMPTS, SAMPLING["greedy"])
    assert engine.runner.grammars is None
    assert {config.grammar_words for _, config, *_ in engine.runner.programs.compiled if config} == {0}

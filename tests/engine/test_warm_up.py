"""An engine that warms up: its programs are few and known at its start, and no request waits for another."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.decode.state import Variant
from jaxspec.engine import assembly, warming
from jaxspec.engine.batch import FEW, NEVER, ChunkShape
from jaxspec.engine.catalogue import ClosedCatalogue, Launch, OpenCatalogue, prefills, row_counts, variants
from jaxspec.engine.warming import plans, warm_up
from jaxspec.inspect import info
from jaxspec.options.engine import EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.runtime import programs
from pallas_kernels.device import Device, here
from tests.server.running import wait
from tests.support import grammars, lively_models, tiny_models
from tests.support.lively_models import OPTIONS, PROMPTS, VOCAB, noisy, plain, serve, target, texts
from tests.support.sizes import cases
from tests.support.soak import Soak, complaints, draw, reference_engine, tiny_engine

LONG = 300  # seconds: what takes longer does not end
SMALL = OPTIONS | {"max_num_seqs": 1, "prefill_chunk": 16, "warm_up": True, "grammar_pool_mib": 0}
MANY_IDS = list(range(0, VOCAB, 3))


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def small(speculative=NGRAM, **options):
    return tiny_models.engine(target(), speculative, None, **SMALL | options)


def catalogue(platform: str, max_num_seqs: int, k: int, **options) -> ClosedCatalogue:
    spec = SpeculativeConfig(model="x", num_speculative_tokens=k) if k else None
    config = EngineConfig(max_num_seqs=max_num_seqs, warm_up=True, **options)
    return assembly.catalogue(config, spec, Device(platform), 2048 + k, lags=bool(k))


# How many


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("max_num_seqs", "k", "most"), [(64, 4, 50), (16, 4, 50), (64, 0, 26), (1, 4, 28)])
def test_they_are_few(platform, max_num_seqs, k, most):
    found = catalogue(platform, max_num_seqs, k)
    listed = [*found.launches, *found.prefills]
    assert len(set(listed)) == len(listed)
    assert len(set(map(str, listed))) == len(listed), "names tell them apart"
    assert len(listed) + len(found.others) <= most
    without = catalogue(platform, max_num_seqs, k, grammar_pool_mib=0)
    others = [p for p in found.launches if not p.variant.grammars]
    assert others == list(without.launches), "no batch without a grammar has another program for it"
    assert len(found.launches) - len(others) <= len(others) * 2 // 3
    assert found.prefills == without.prefills
    assert [name for name in found.others if name not in without.others] == ["write_grammar"]


@pytest.mark.parametrize(
    ("most", "counts"),
    [(64, (1, 16, 64)), (16, (1, 4, 16)), (6, (1, 2, 8)), (256, (1, 16, 64, 256)), (2, (1, 2)), (1, (1,))],
)
def test_sizes_of_batches(most, counts):
    assert row_counts(most) == counts


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (ChunkShape(16, 16, finer=True), {1: 1, 2: 2, 4: 4, 6: 6, 8: 8, 12: 12, 16: 16}),
        (ChunkShape(7, 16, finer=True), {1: 1, 2: 2, 4: 4, 6: 6, 7: 7}),
        (ChunkShape(64, 32, 8), {8: 8, 16: 16, 32: 32, 64: 64}),
    ],
)
def test_sizes_of_passes_over_prompts(shape, sizes):
    """The smallest that takes the pieces, and each is warmed up."""
    for count in range(1, shape.rows + 1):
        assert shape.padded(count) == next(size for size in sizes if size >= count)
    made = [p.shape for p in prefills(shape, 9, catches_up=False) if p.variant.logprobs is None]
    assert {s.padded(1): s.least_rows for s in made} == sizes


@pytest.mark.parametrize("rule", [None, "standard", "coupled", "typical", "synthetic"])
def test_every_batch_has_a_program(rule):
    """Whatever it asks for, of every number of rows and drafts, and the smallest of those that serve."""
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    sizes = {"max_num_seqs": 64, "table_widths": (5, 9), "chunk": ChunkShape(32, 64, 4)}
    found = ClosedCatalogue(assembly.ks(spec), rule, **sizes, catches_up=True, grammars=True)
    found.made.update(found.launches)
    greedy, sampled, whole = variants(rule)
    for rows, pages, k in [(1, 3, 0), (1, 9, 4), (9, 3, 2), (9, 6, 4), (9, 5, 0), (64, 3, 4)]:
        shape = found.shape(rows, pages)
        size = next(n for n in (1, 16, 64) if n >= rows)
        width = 5 if size == 16 and pages <= 5 else 9
        for wanted, (most, columns, variant) in {
            greedy: (k, width, greedy),
            Variant(sampled.rules, filters=True): (k, width, sampled),
            Variant(greedy.rules, logprobs=5): (4 if k else 0, 9, whole),
            Variant(greedy.rules, processors=True): (4 if k else 0, 9, whole),
            whole: (4 if k else 0, 9, whole),
            Variant(greedy.rules, grammars=True): (4 if k else 0, 9, dataclasses.replace(sampled, grammars=True)),
            dataclasses.replace(whole, grammars=True): (4, 9, dataclasses.replace(whole, grammars=True)),
        }.items():
            assert found.launch(k, shape, wanted) == Launch(most, size, columns, variant)
        assert found.prefill("prefill", found.prefills[0].shape, shape[1], Variant()).row_pages == 9


# What is compiled


WANTED = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 7, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 3, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 4, "num_speculative_tokens": 0},
    {"temperature": 0.0, "logit_bias": dict.fromkeys(MANY_IDS, 4.0), "stop_token_ids": list(range(1, VOCAB, 7))},
    {"temperature": 0.7, "seed": 5, "allowed_token_ids": MANY_IDS},
    {"temperature": 0.0, "n": 2},
    {"temperature": 0.0, "max_tokens": 11},
    {"temperature": 0.8, "seed": 6, "presence_penalty": 0.5, "logprobs": 2},
)
AUTOMATA = [None] * (len(WANTED) - 2) + [grammars.random(VOCAB, 9, seed, legal=0.4) for seed in (1, 2)]


@cases("method", [None, "ngram"], quick=[None])
def test_requests_wait_for_nothing_and_get_what_they_would_get(method):
    spec = {"method": method, "num_speculative_tokens": 2} if method else None
    engine, said = tiny_models.engine(target(), spec, None, **SMALL | {"grammar_pool_mib": 1}), []
    warm_up(engine, lambda done, total, name: said.append((done, total, name)))
    known = engine.runner.programs.num_compiled
    assert known == len(list(plans(engine))) == said[-1][0] == said[-1][1]
    assert said[0][:2] == (0, known)
    assert "copy_pages" in {name for *_, name in said}
    assert engine.timing.warm_up_seconds > 0
    sampling = [SamplingParams(**{"max_tokens": 12} | wanted) for wanted in WANTED]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(sampling))]
    requests = serve(engine, prompts, sampling, automata=AUTOMATA)
    assert [r.error for r in requests] == [None] * len(requests)
    assert (engine.runner.programs.num_compiled, engine.timing.num_compiled) == (known, 0)
    assert texts(requests) == texts(serve(lively_models.engine(), prompts, sampling, automata=AUTOMATA))


@pytest.mark.parametrize("drafted", [False, True])
def test_info_lists_them(drafted):
    """Without making an engine."""
    sizes = {"max_num_seqs": 6, "max_model_len": target().config.max_model_len, "num_pages": 64, "warm_up": True}
    spec = {"model": "x"} if drafted else None
    engine = tiny_models.engine(target(), spec, noisy(target()) if drafted else None, **sizes)
    assert info.programs(engine.runner.configs, engine.config, here()) == [str(program) for program, _ in plans(engine)]


def test_one_that_did_not_warm_up_counts_what_requests_waited_for():
    engine = small(warm_up=False)
    engine.add(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=5))
    while engine.busy:
        engine.step()
    assert engine.timing.num_compiled == engine.runner.programs.num_compiled > 0
    assert list(plans(engine)) == []


@cases("method", ["draft_model", "ngram+eagle3"], rest=["draft_model"])
def test_the_soak_compiles_nothing(method, monkeypatch):
    """Rows give way and come back; prompts are queued ahead of launches; block tables have two widths."""
    monkeypatch.setattr("jaxspec.engine.catalogue.FEWEST_ROWS", 2)
    rng = np.random.default_rng(5)
    requests = draw(rng, 60)
    for i, case in enumerate(requests[40:], 40):
        simple = SamplingParams(temperature=0.0, max_tokens=case.params.max_tokens)
        requests[i] = dataclasses.replace(case, params=simple, bad_words=())
    engine = tiny_engine(method, warm_up=True, max_num_seqs=2)
    soak = Soak(engine, rng)
    del engine.grown_shape
    (widest,) = engine.catalogue.table_widths
    sizes = {"max_num_seqs": engine.config.max_num_seqs, "table_widths": (widest // 2, widest)}
    lags = engine.lag.most is not None
    engine.catalogue = ClosedCatalogue(
        tuple(engine.runner.drafters), None, **sizes, chunk=engine.prefilling.shape, catches_up=lags, grammars=True
    )
    engine.prefilling.catalogue = engine.catalogue
    warm_up(engine)
    known, run, widths = engine.runner.programs.num_compiled, engine.runner.start, Counter()

    def start(plan):
        if plan.program == "launch":
            (launched,) = plan.arrays
            widths[launched.block_table.shape] += 1
        return run(plan)

    monkeypatch.setattr(engine.runner, "start", start)
    soak.serve(requests)
    assert {rows: sorted(n for b, n in widths if b == rows) for rows in (1, 2)} == {
        1: [widest],
        2: [widest // 2, widest],
    }
    soak.check_idle()
    assert (engine.runner.programs.num_compiled, engine.timing.num_compiled) == (known, 0)
    assert complaints(requests, soak.requests, reference_engine()) == []
    assert min(soak.launches[k] for k in (0, 2, 4)) > 0
    assert soak.passes["queued"] > 0


# Threads


def test_two_that_want_the_same_program_make_it_once(monkeypatch):
    engine, made, lower = small(), [], programs.lower
    together = threading.Barrier(2)
    monkeypatch.setattr(programs, "lower", lambda *arguments: made.append(1) or lower(*arguments))
    _, plan = next(plans(engine))

    def compile():
        together.wait(LONG)
        engine.runner.compile(plan)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(compile) for _ in range(2)]:
            done.result(LONG)
    assert made == [1]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_program_that_could_not_be_made_is_made_again(monkeypatch, error):
    engine, lower = small(), programs.lower
    _, plan = next(plans(engine))

    def failing(*arguments):
        raise error

    monkeypatch.setattr(programs, "lower", failing)
    with pytest.raises(error):
        engine.runner.compile(plan)
    monkeypatch.setattr(programs, "lower", lower)
    engine.runner.compile(plan)
    assert engine.runner.programs.num_compiled == 1


def test_what_fails_ends_the_warm_up(monkeypatch):
    engine = small()

    def failing(*arguments):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(programs, "lower", failing)
    with pytest.raises(RuntimeError, match="no compiler"):
        warm_up(engine)


def test_the_last_of_the_catalogue_are_lowered_first(monkeypatch):
    engine, lowered = small(), []
    wanted = [(plan.program, plan.variant) for _, plan in plans(engine)][::-1]
    monkeypatch.setattr(programs, "lower", lambda *arguments: lowered.append(arguments[:2]))
    monkeypatch.setattr(programs, "compiled", lambda lowered: None)
    warm_up(engine)
    assert [(name, config.variant if config else Variant()) for name, config in lowered] == wanted


def test_an_interrupt_does_not_wait_for_the_compiler(monkeypatch):
    """What it has not begun it never does: the process could not end before."""
    engine, told, begun, lowered = small(), threading.Event(), [], itertools.count()

    def lower(*arguments):
        if next(lowered) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(warming, "COMPILERS", 2)
    monkeypatch.setattr(programs, "lower", lower)
    monkeypatch.setattr(programs, "compiled", lambda lowered: begun.append(1) or told.wait(60))
    try:
        with pytest.raises(KeyboardInterrupt):
            warm_up(engine)
        assert len(begun) <= 2
    finally:
        told.set()
    wait(lambda: not compilers())
    assert len(begun) <= 2


# Beside requests


def compilers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(warming.THREADS)]


@pytest.fixture
def beside(monkeypatch):
    """An engine, what it has lowered in this order, and what begins its warm-up beside requests."""
    engine, lowered, lower = small(None, wait_for_warm_up=False), [], programs.lower
    monkeypatch.setattr(programs, "lower", lambda *arguments: lowered.append(arguments[0]) or lower(*arguments))
    started = []

    def start() -> warming.Background:
        watch = lambda beside: contextlib.nullcontext(lambda done, total, name: None)
        started.append(warming.begin(engine, watch, alone=True))
        return started[-1]

    yield engine, lowered, start
    engine.runner.programs.calm.set()
    for background in started:
        background.stop()
    wait(lambda: not compilers())


def test_requests_are_served_while_programs_are_made(beside, monkeypatch):
    """What they need is compiled at once, though it was lowered to be compiled last; and nothing twice."""
    engine, lowered, start = beside
    told, compile, count = threading.Event(), engine.runner.compile, len(list(plans(engine)))

    def late(plan):
        if plan.program == "launch":
            assert told.wait(60)
        compile(plan)

    monkeypatch.setattr(engine.runner, "compile", late)
    background = start()
    wait(lambda: len(lowered) == count)
    params = (SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(temperature=0.9, seed=3, max_tokens=12))
    requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=False)]
    while engine.busy:
        engine.step()
    assert engine.timing.num_compiled > 0
    assert engine.runner.programs.num_compiled < count
    told.set()
    background.join(60)
    assert engine.runner.programs.num_compiled == len(lowered) == count
    assert engine.timing.warm_up_seconds > 0
    assert texts(requests) == plain(PROMPTS[:2], params)


def test_a_warm_up_begins_nothing_while_a_request_waits(beside):
    engine, lowered, start = beside
    engine.runner.programs.calm.clear()
    start()
    time.sleep(0.2)
    assert not lowered
    engine.runner.programs.calm.set()
    wait(lambda: lowered)


def test_a_warm_up_is_stopped(beside, monkeypatch):
    _, lowered, start = beside
    stopping, stopped = threading.Event(), threading.Event()
    lower = programs.lower
    monkeypatch.setattr(programs, "lower", lambda *given: stopping.set() or (stopped.wait(60) and lower(*given)))
    background = start()
    assert stopping.wait(60)
    background.stopped.set_result(None)
    stopped.set()
    background.stop()
    assert not background.is_alive()
    assert len(lowered) == 1


def test_a_warm_up_that_is_stopped_does_not_wait_for_the_compiler(beside, monkeypatch):
    """All is lowered, and two programs are being compiled."""
    engine, lowered, start = beside
    told, begun = threading.Event(), []
    monkeypatch.setattr(programs, "compiled", lambda lowered: begun.append(1) or told.wait(60))
    background = start()
    wait(lambda: len(lowered) == len(list(plans(engine))))
    background.stop()
    assert compilers(), "they wait to be told"
    told.set()
    wait(lambda: not compilers())
    assert 1 <= len(begun) <= warming.COMPILERS


def test_a_program_that_cannot_be_made_beside_requests_is_told_of(beside, monkeypatch, caplog):
    """Those that do not need it are served."""
    engine, _, start = beside
    lower = programs.lower

    def failing(name, config, *arguments):
        if config is not None and config.variant.processors:
            raise RuntimeError("no compiler")
        return lower(name, config, *arguments)

    monkeypatch.setattr(programs, "lower", failing)
    background = start()
    background.join(60)
    failed = [str(p) for p, plan in plans(engine) if plan.variant.processors]
    assert sorted(caplog.messages) == sorted(f"compiling in advance failed for {name}: no compiler" for name in failed)
    assert engine.runner.programs.num_compiled == len(list(plans(engine))) - len(failed) > 0
    request = engine.add(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4))
    other = engine.add(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4, logit_bias={5: 1.0}))
    while engine.busy:
        engine.step()
    assert (request.finish_reason, request.error) == ("length", None)
    assert "no compiler" in other.error


def test_a_wider_program_serves_until_the_smallest_is_made():
    """With as many drafts: how many there are is not the catalogue's to decide."""
    found = catalogue("cpu", 16, 4)
    greedy, sampled, whole = variants(None)
    (width,) = found.table_widths
    wide = Launch(4, 16, width, sampled)
    found.made.add(wide)
    assert found.launch(4, (1, width), greedy) == wide
    assert found.launch(2, (1, width), greedy) == Launch(2, 1, width, greedy)
    assert found.launch(4, (1, width), whole) == Launch(4, 1, width, whole)
    found.made.add(Launch(4, 1, width, greedy))
    assert found.launch(4, (1, width), greedy) == Launch(4, 1, width, greedy)


def test_the_last_rows_move_to_a_smaller_program_that_is_made():
    """Without a warm-up an earlier batch of few rows has made it. One that is not made is not waited for."""
    found = OpenCatalogue([8, 32], 64)
    greedy, sampled, _ = variants(None)
    whole = found.launch(4, found.shape(64, 32), greedy, (64, 32))
    assert whole == Launch(4, 64, 32, greedy)
    assert found.most_ends(whole, 40, 40, others_wait=False) == NEVER
    assert found.launch(4, found.shape(9, 8), greedy, (9, 8)) == whole
    found.idle()
    few = found.launch(4, found.shape(9, 32), greedy, (9, 32))
    assert few == Launch(4, 16, 32, greedy)
    found.shape(64, 32)
    assert found.most_ends(whole, 40, 40, others_wait=False) == 40 - 16
    assert found.most_ends(whole, 72, 64, others_wait=False) == 72 - 16
    assert found.most_ends(whole, 70, 64, others_wait=True) == 6 + 4
    assert found.launch(4, found.shape(16, 32), greedy, (16, 32)) == few
    assert found.launch(4, found.shape(17, 32), greedy, (17, 32)) == whole
    assert found.launch(2, found.shape(16, 32), greedy, (16, 32)) == dataclasses.replace(whole, k=2)
    assert found.launch(4, found.shape(16, 32), sampled, (16, 32)) == dataclasses.replace(whole, variant=sampled)
    assert found.most_ends(few, 10, 10, others_wait=False) == NEVER


# Long lists


def test_long_lists_do_as_short_ones():
    """The same few ids, in a program for many."""
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=16,
        logit_bias={5: 3.0, 9: -4.0},
        allowed_token_ids=list(range(0, 64, 5)),
        min_tokens=4,
    )
    found = []
    for long in (False, True):
        own = small(warm_up=False)
        launch = own.catalogue.launch
        own.catalogue.launch = lambda k, shape, exact, *_, long=long, launch=launch: launch(
            k, shape, Variant(exact.rules, processors=True, long_lists=long)
        )
        request = own.add(PROMPTS[3], sampling, bad_words=[[5, 10]], stop_ids=[20])
        assert FEW.holds(request)
        while own.busy:
            own.step()
        found.append((request.output, request.finish_reason))
    assert found[0] == found[1]
    assert len(found[0][0]) >= 4


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({"stop_ids": range(1025)}, "stop_token_ids: 1025 ids end the text, at most 1024 may"),
        ({"bad_words": [[1]] * 257}, "bad_words: 257 words of up to 1 tokens, at most 256 of 32 may be listed"),
        ({"bad_words": [[1] * 33]}, "bad_words: 1 words of up to 33 tokens, at most 256 of 32 may be listed"),
    ],
)
def test_lists_without_end_are_refused(listed, said):
    with pytest.raises(UserError, match=said):
        small(warm_up=False).add(PROMPTS[0], SamplingParams(), **listed)

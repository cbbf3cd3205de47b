"""Short prompts are not held up by long ones, nor the tokens of streams by prompts."""

from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np
import pytest

from docs.tools import bench_fairness
from docs.tools import virtual_clock as clock
from jaxspec.engine.batch import RESERVED, ChunkShape, shares
from jaxspec.engine.catalogue import ClosedCatalogue, OpenCatalogue
from jaxspec.engine.engine import Engine
from tests.support import few_programs
from tests.support.lively_models import new_engine, params, plain, repeating
from tests.support.sizes import cases

WIDTH = 16
LONG, SHORT = repeating(55, 7, 3), repeating(9, 3, 1)
SIZES = {"page_size": 4, "num_pages": 80, "max_num_seqs": 4, "enable_prefix_caching": False}


def read_all(arriving: list[tuple[int, int]], chunk: ChunkShape) -> list[int]:
    """The pass in which each prompt was read to its end; arriving: (pass, tokens) of each prompt, in order."""
    unread = [tokens for _, tokens in arriving]
    ended = [-1] * len(arriving)
    for turn in range(10_000):
        here = [i for i, (at, _) in enumerate(arriving) if at <= turn and unread[i] > 0]
        for i, rows in zip(here, shares([unread[i] for i in here], chunk, turn), strict=True):
            unread[i] -= rows * chunk.width
            ended[i] = turn if unread[i] <= 0 else -1
        if min(ended) >= 0:
            return ended
    raise AssertionError(f"unread after 10,000 passes: {unread}")


@pytest.mark.parametrize(
    ("unread", "rows", "expected"),
    [
        ([100], 4, [4]),  # one alone has the whole pass
        ([100, 5], 4, [3, 1]),
        ([1000, 50, 1, 17], 8, [2, 3, 1, 2]),
        ([1000, 500, 200, 100], 8, [2, 0, 0, 6]),
        ([100, 100, 100], 8, [7, 1, 0]),  # prompts of one length go one after the other
        ([5, 1000], 8, [1, 7]),
        ([3, 3, 3], 8, [1, 1, 1]),
    ],
)
def test_a_pass_is_shared(unread, rows, expected):
    assert shares(unread, ChunkShape(rows, WIDTH), 0) == expected


def test_prompts_of_states_have_one_row_each():
    assert shares([1000, 50, 0, 3, 5], ChunkShape(3, WIDTH, several=False), 3) == [0, 1, 0, 1, 1]
    assert shares([1000, 50, 0, 3, 5], ChunkShape(3, WIDTH, several=False), 0) == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 16, 64])
def test_a_long_prompt_has_a_quarter_of_the_passes_whatever_comes(rows):
    """Shorter prompts that fill every pass do not stop it; each pass is full."""
    chunk, length = ChunkShape(rows, WIDTH), 50
    endless = [(turn, 1) for turn in range(RESERVED * length) for _ in range(rows)]
    ended = read_all([(0, length * rows * WIDTH), *endless], chunk)
    assert RESERVED * length - RESERVED <= ended[0] < RESERVED * length


@pytest.mark.parametrize("seed", range(10))
def test_no_prompt_takes_more_than_four_times_as_long_as_by_age(seed):
    rng = np.random.default_rng(seed)
    chunk = ChunkShape(int(rng.choice([1, 2, 4, 8])), WIDTH)
    lengths = (WIDTH * rng.integers(1, 30, 60)).tolist()
    ended = read_all([(0, length) for length in lengths], chunk)
    for i, at in enumerate(ended):
        by_age = -(-sum(lengths[: i + 1]) // (chunk.rows * WIDTH))
        assert at < RESERVED * by_age, (i, at, by_age)


@cases("method", ["noisy", "plain"], quick=["plain"])
def test_a_short_prompt_does_not_wait_for_a_long_one(method):
    """It comes while the long one is read, and has its first token after the next pass; both have their own tokens."""
    engine = new_engine(method, 3 * (method == "noisy"), prefill_chunk=32, **SIZES)
    sampling = params((5, 5))
    long = engine.add(LONG, sampling[0])
    engine.step(1)
    assert 0 < long.target_len < len(LONG) - 1, "one pass a step, so that others can come"
    short = engine.add(SHORT, sampling[1])
    engine.step(1)
    assert short.output
    assert not long.output
    while engine.busy:
        engine.step(1)
    assert [long.output, short.output] == plain((LONG, SHORT), tuple(sampling))


@pytest.mark.parametrize(("rows", "early"), [(4, True), (5, False)])
def test_while_clients_stream_a_pass_waits_for_arrivals_if_rows_are_free(monkeypatch, rows, early):
    """A pass queued behind a launch leaves out the requests that arrive while the launch runs."""
    engine = of_four_rows()
    engine.config = dataclasses.replace(engine.config, max_gap_ms=None)
    monkeypatch.setattr(engine.scheduler, "max_num_seqs", rows)
    requests = [engine.add(SHORT, params(40)[0])]
    engine.step(1, streaming=True)
    requests += [engine.add(repeating(50, 11, kind), params(2)[0]) for kind in range(3)]
    engine.step(1, streaming=True)
    assert bool(engine.open_requests.queued) == early
    for request in requests:
        engine.abort(request)


def test_rows_that_decode_go_on_when_an_older_prompt_is_read_late():
    engine = new_engine(prefill_chunk=32, **SIZES | {"max_num_seqs": 1})
    engine.scheduler.max_num_seqs = 2  # one is read ahead
    sampling = params((5, 5))
    long = engine.add(LONG, sampling[0])
    engine.step(1)
    short = engine.add(SHORT, sampling[1])
    while engine.busy:
        engine.step(1)
        assert short.finish_reason or not long.output
    assert [long.output, short.output] == plain((LONG, SHORT), tuple(sampling))


@functools.cache
def of_four_rows() -> Engine:
    with few_programs.exact_shapes():
        return new_engine(prefill_chunk=64, **SIZES)


def costs(engine, monkeypatch, row: float, launch: float) -> list[int]:
    """Make passes and launches take these seconds a row and each; return the rows of each pass to come."""
    passes, clock, start, fetch = [], [0.0], engine.runner.start, engine.runner.fetch

    def started(plan):
        if plan.program == "prefill":
            passes.append(len(plan.arrays[0].length))
            clock[0] += row * passes[-1]
        return start(plan)

    def fetched(result):
        clock[0] += launch
        return fetch(result)

    monkeypatch.setattr(engine.runner, "start", started)
    monkeypatch.setattr(engine.runner, "fetch", fetched)
    for module in ("account", "prefilling"):
        monkeypatch.setattr(f"jaxspec.engine.{module}.time.perf_counter", lambda: clock[0])
    return passes


@pytest.mark.parametrize(
    ("row", "launch", "gap", "streaming", "largest"),
    [
        (0.010, 0.02, 200.0, True, 4),  # 40 ms of 180: the whole pass
        (0.050, 0.02, 200.0, True, 1),  # 200 ms of 180 would be too much, and no program between was made
        (0.050, 0.02, 200.0, False, 4),
        (0.050, 0.02, float("inf"), True, 4),
        (0.050, 0.02, 300.0, True, 4),
        (5.000, 0.02, 200.0, True, 1),
        (0.050, 0.30, 200.0, True, 4),  # a pass may always take as long as a launch
    ],
)
def test_passes_are_as_large_as_the_gap_of_streams_allows(monkeypatch, row, launch, gap, streaming, largest):
    engine = of_four_rows()
    engine.config = dataclasses.replace(engine.config, max_gap_ms=gap)
    engine.prefilling.seconds_of.clear()
    engine.prefilling.settled, engine.launch_seconds = 0.0, 0.0
    passes = costs(engine, monkeypatch, row, launch)
    first = engine.add(SHORT, params(40)[0])
    engine.step(1, streaming=streaming)
    del passes[:]
    for kind in range(3):  # of each size, the first pass tells how long it takes
        late = engine.add(repeating(58, 11, kind), params(2)[0])
        while not late.output:
            engine.step(1, streaming=streaming)
        engine.abort(late)
    assert max(passes[1:]) == largest
    assert first.output
    engine.abort(first)


def test_passes_are_limited_to_sizes_that_have_programs():
    """An engine that compiles on demand has few of them."""
    shape, fine = ChunkShape(64, 32, least_rows=8), ChunkShape(16, 16, finer=True)
    closed = ClosedCatalogue((0,), None, max_num_seqs=4, table_widths=(4,), chunk=fine, catches_up=False)
    assert OpenCatalogue((4,), 1).pass_rows(shape) == (16, 64)
    assert OpenCatalogue((4,), 1).pass_rows(fine) == (1, 4, 16)
    assert closed.pass_rows(fine) == (1, 2, 4, 6, 8, 12, 16)
    assert {p.shape.least_rows for p in closed.prefills} == {1, 2, 4, 6, 8, 12, 16}


def test_short_prompts_beside_long_ones_wait_little_longer_than_alone(monkeypatch):
    """On a clock that the costs of an H200 advance, the 99th percentile of the first token's delay."""
    for name in ("perf_counter", "sleep"):
        monkeypatch.setattr(time, name, getattr(time, name))  # put back afterwards, because the clock replaces them

    def slowest(*, long: bool) -> float:
        planned = bench_fairness.plan(6, 1, clock.MODEL.vocab_size, long=long)
        return float(np.percentile(bench_fairness.delays(clock.new_engine(None), planned), 99))

    alone = slowest(long=False)
    assert 0 < alone < slowest(long=True) < 1.5 * alone

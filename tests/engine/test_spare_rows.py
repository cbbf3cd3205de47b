"""Spare rows of a launch: requests that take the place of rows that end, without a return to the host."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jaxspec.decode.state import Variant
from jaxspec.engine.engine import Engine
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.verify import rules
from tests.support.lively_models import VOCAB, new_engine

K = 2
ROWS, SPARE = 4, 3
RULES = frozenset({rules.UNSEEDED, rules.SEEDED})
EVERYTHING = Variant(RULES, filters=True, logprobs=2, processors=True)
VARIED = (
    {},
    {"temperature": 1.0, "seed": 5, "top_k": 9},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logit_bias": {3: 4.0}, "min_tokens": 4},
)


def of_spare_rows(method: str, num_spare: int, *, options: Mapping[str, Any] = {}, **spec) -> Engine:
    engine = new_engine(method, K * (method != "plain"), spec=spec, max_num_seqs=ROWS, num_pages=200, **options)
    engine.catalogue.spare[ROWS] = num_spare
    engine.scheduler.max_num_seqs = ROWS + SPARE
    engine.grown_shape = lambda *requests: (ROWS, 4)  # type: ignore[method-assign]  # compiling takes longest
    engine.catalogue.variants.choose = lambda program, exact: EVERYTHING  # type: ignore[method-assign]
    return engine


def serve(method: str, num_spare: int) -> tuple[list, int]:
    """Serve requests of many lengths. Return them, and the number of launches."""
    return serve_by(of_spare_rows(method, num_spare))


def serve_by(engine: Engine) -> tuple[list, int]:
    """Serve the same requests on this engine. Return as `serve` does."""
    rng = np.random.default_rng(3)
    requests = [
        engine.add(
            rng.integers(0, VOCAB, rng.integers(2, 12)).tolist(),
            SamplingParams(
                max_tokens=int(rng.integers(4, 20)),
                ignore_eos=True,
                **{"temperature": 0.0} | VARIED[i % len(VARIED)],
            ),
        )
        for i in range(20)
    ]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return requests, steps


@pytest.fixture(scope="module", params=[pytest.param("plain", marks=pytest.mark.thorough), "noisy"])
def served(request):
    return serve(request.param, 0), serve(request.param, SPARE)


def test_a_request_gets_the_same_with_and_without_spare_rows(served):
    (expected, _), (requests, _) = served
    for without, own in zip(expected, requests, strict=True):
        assert (own.output, own.finish_reason) == (without.output, without.finish_reason)
        assert [entry.top_ids for entry in own.logprobs] == [entry.top_ids for entry in without.logprobs]
        np.testing.assert_allclose(
            [entry.logprob for entry in own.logprobs], [entry.logprob for entry in without.logprobs], atol=1e-4
        )


def test_spare_rows_make_launches_fewer(served):
    (_, without), (_, own) = served
    assert own < without


def test_the_next_prompts_are_read_while_the_host_takes_results_in():
    """A prompt fills a pass here. One that no row waits for is read behind the launch, before results are fetched."""
    engine = of_spare_rows("noisy", SPARE, options={"prefill_chunk": 16})
    engine.scheduler.max_num_seqs = ROWS + 2 * SPARE
    order: list[str] = []
    start, fetch = engine.runner.start, engine.runner.fetch
    engine.runner.start = lambda plan: (order.append(plan.program), start(plan))[1]
    engine.runner.fetch = lambda result: (order.append("fetch"), fetch(result))[1]
    expected, _ = serve("noisy", 0)
    requests, _ = serve_by(engine)
    assert [r.output for r in requests] == [r.output for r in expected]
    behind = {after for before, after in itertools.pairwise(order) if before == "launch"}
    assert behind == {"fetch", "prefill"}


def test_a_launch_whose_results_are_lost_is_run_again():
    """The pass behind it fails: both are recomputed, and only the pass's request ends with an error."""
    engine = of_spare_rows("plain", SPARE, options={"prefill_chunk": 16})
    engine.scheduler.max_num_seqs = ROWS + 2 * SPARE
    order: list[str] = []
    start, fetch = engine.runner.start, engine.runner.fetch

    def start_or_fail(plan):
        order.append(plan.program)
        if order[-2:] == ["launch", "prefill"] and "failed" not in order:
            order.append("failed")
            raise RuntimeError("a planted fault")
        return start(plan)

    engine.runner.start = start_or_fail
    engine.runner.fetch = lambda result: (order.append("fetch"), fetch(result))[1]
    requests, _ = serve_by(engine)
    expected, _ = serve("plain", 0)
    ended = [r.finish_reason for r in requests]
    assert ended.count("error") == 1
    for own, without in zip(requests, expected, strict=True):
        assert own.finish_reason == "error" or own.output == without.output


def test_an_error_of_a_launch_ends_no_request_of_the_pass_behind_it():
    """A pass with log-probabilities is fetched at once, so none is queued behind a launch."""
    engine = of_spare_rows("plain", SPARE, options={"prefill_chunk": 16})
    engine.scheduler.max_num_seqs = ROWS + 2 * SPARE
    few = SamplingParams(temperature=0.0, max_tokens=4)
    bad = engine.add([5, 3], few)
    others = [engine.add([7, 3 + i], SamplingParams(max_tokens=2, prompt_logprobs=1)) for i in range(3)]
    fetch, start = engine.runner.fetch, engine.runner.start
    broken: list[Any] = []

    def start_launch(plan):
        result = start(plan)
        if plan.program == "launch" and bad.finish_reason is None:
            broken.append(result)
        return result

    def fetch_or_fail(result):
        if broken:  # what runs after the launch fails with it
            broken.clear()
            raise RuntimeError("a planted fault")
        return fetch(result)

    engine.runner.start, engine.runner.fetch = start_launch, fetch_or_fail
    while engine.busy:
        engine.step()
    assert bad.finish_reason == "error"
    assert [r.finish_reason for r in others] == ["length"] * 3


def test_a_stream_has_no_shorter_launches_beside_a_request_that_waits():
    engine = of_spare_rows("plain", SPARE)
    requests = [engine.add([5, 3 + i], SamplingParams(temperature=0.0, max_tokens=40)) for i in range(ROWS + 1)]
    engine.step(streaming=True)
    before = len(requests[0].output)
    engine.controller.rounds_within = lambda *choice: 8  # whatever a round takes here
    engine.step(8, streaming=True)
    assert not requests[-1].output
    assert len(requests[0].output) == before + 8


def test_a_seeded_spare_row_has_its_own_number_of_drafts():
    """Its rule draws noise for each round, so its tokens hang on the number of drafts."""
    engine = of_spare_rows("noisy", SPARE, rejection_sample_method="standard")
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    alone = engine.add([7, 9], seeded)
    while engine.busy:
        engine.step()
    for i in range(ROWS):
        engine.add([5, 3 + i], SamplingParams(temperature=0.0, max_tokens=9, num_speculative_tokens=0))
    beside = engine.add([7, 9], seeded)
    while engine.busy:
        engine.step()
    assert beside.output == alone.output

"""Spare rows of a launch: requests that take the place of rows that end, without a return to the host."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.options.sampling_params import SamplingParams
from tests.support.lively_models import VOCAB, new_engine

K = 2
ROWS, SPARE = 4, 3
VARIED = (
    {},
    {"temperature": 1.0, "seed": 5, "top_k": 9},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"logit_bias": {3: 4.0}, "min_tokens": 4},
)


def serve(method: str, num_spare: int) -> tuple[list, int]:
    """Serve requests of many lengths. Return them, and the number of launches."""
    engine = new_engine(method, K * (method != "plain"), max_num_seqs=ROWS, num_pages=200)
    engine.num_spare = num_spare
    engine.scheduler.max_num_seqs = ROWS + SPARE
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


@pytest.fixture(scope="module", params=["plain", "noisy"])
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

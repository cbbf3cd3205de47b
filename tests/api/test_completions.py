"""Jobs, from requests made by hand: pieces, log-probabilities by id, timing over samples, what failed."""

from __future__ import annotations

import pytest

from jaxspec.api.completions import PromptRun, described, failures, timing_of
from jaxspec.api.outputs import Logprob
from jaxspec.api.prompts import PromptRequest
from jaxspec.api.tokens import Token, vocabulary
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request, Times, TokenLogprobs
from jaxspec.options.sampling_params import SamplingParams


class Letters:
    """Id i is the i-th letter."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(97 + i) for i in ids)


def prompt_run(params: SamplingParams | None = None, prompt=(0, 1, 2)) -> PromptRun:
    """As many requests as samples, none of which has run."""
    params, samples = params or SamplingParams(), []
    for index in range(params.n):
        made = Request(7 + index, list(prompt), params, 0, False, (25,), 64, 0, index=index, samples=samples)
        made.samples = samples
        samples.append(made)
    return PromptRun(Letters(), PromptRequest(4, "abc", list(prompt), params), samples[0])


ENTRY = TokenLogprobs(-3.0, 5, [9, 8, 7], [-0.5, -1.0, -2.0])


@pytest.mark.parametrize(
    ("chosen", "most", "expected"),
    [
        (4, 2, [(4, -3.0, 5), (9, -0.5, 1), (8, -1.0, 2)]),
        (4, 0, [(4, -3.0, 5)]),
        (8, 3, [(8, -3.0, 5), (9, -0.5, 1), (7, -2.0, 3)]),  # what the engine says of the chosen one holds
    ],
)
def test_the_chosen_id_comes_first_then_the_likeliest(chosen, most, expected):
    letters, token = Letters(), Token("here", b"now")
    (found,) = described(vocabulary(letters), [chosen], [token], [ENTRY], most)
    (_, own), *others = found.items()
    assert own == Logprob(expected[0][1], expected[0][2], "here", tuple(b"now"))
    letter = lambda i: letters.decode([i])
    assert others == [(i, Logprob(lp, rank, letter(i), (97 + i,))) for i, lp, rank in expected[1:]]


def test_logprobs_of_a_job():
    made = prompt_run(SamplingParams(logprobs=1, prompt_logprobs=0))
    (request,) = made.requests
    request.output, request.finish_reason = [3, 4], "length"
    request.logprobs = [ENTRY, ENTRY._replace(logprob=-1.5, rank=2)]
    request.prompt_logprobs = [ENTRY._replace(logprob=-0.25), ENTRY]
    output = made.output()
    assert [list(entry) for entry in output.outputs[0].logprobs] == [[3, 9], [4, 9]]
    assert output.outputs[0].cumulative_logprob == -4.5
    assert output.prompt_logprobs == [None, {1: Logprob(-0.25, 5, "b", (98,))}, {2: Logprob(-3.0, 5, "c", (99,))}]


def test_pieces_wait_for_the_prompts_logprobs():
    """A sample that is ahead of the one that computes them waits. What fails meanwhile holds nothing back."""
    for failed in (False, True):
        made = prompt_run(SamplingParams(n=2, prompt_logprobs=0))
        scoring, ahead = made.requests
        ahead.output, ahead.finish_reason = [3], "length"
        assert made.pieces() == []
        if failed:
            scoring.finish_reason, scoring.error = "error", "no luck"
        else:
            scoring.prompt_logprobs, scoring.output = [ENTRY, ENTRY], [4]
        pieces = made.pieces()
        assert [(piece.sample, piece.text) for piece in pieces] == [(0, "" if failed else "e"), (1, "d")]
        assert [len(piece.prompt_logprobs) for piece in pieces] == [1 if failed else 3] * 2


def test_a_job_that_failed_early_has_the_logprobs_that_there_are():
    made = prompt_run(SamplingParams(logprobs=1, prompt_logprobs=0))
    made.requests[0].finish_reason, made.requests[0].error = "error", "no luck"
    output = made.output()
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob, output.prompt_logprobs) == ([], 0, [None])
    assert (output.outputs[0].error, output.timing.time_to_first_token) == ("no luck", None)


def test_pieces_of_samples_end_each_for_itself():
    made = prompt_run(SamplingParams(n=2))
    first, second = made.requests
    assert made.pieces() == []
    first.output += [3, 4]
    (piece,) = made.pieces()
    assert (piece.text, piece.token_ids, piece.prompt_index, piece.sample) == ("de", [3, 4], 4, 0)
    assert made.pieces() == []
    first.finish_reason, second.output = "length", [5]
    assert [(p.text, p.sample, p.finish_reason) for p in made.pieces()] == [("", 0, "length"), ("f", 1, None)]
    assert not made.streamed
    second.finish_reason, second.error = "error", "no luck"
    assert [(p.text, p.sample, p.error) for p in made.pieces()] == [("", 1, "no luck")]
    assert made.streamed
    assert made.ended
    assert made.pieces() == []


def test_metrics_are_summed_and_the_requests_own_stay():
    made = prompt_run(SamplingParams(n=2))
    for request, metrics in zip(
        made.requests, [SpecDecodeMetrics(1, 4, [1, 1], 3), SpecDecodeMetrics(2, 8, [2, 0], 4)], strict=True
    ):
        request.metrics, request.finish_reason = metrics, "length"
    assert made.output().metrics == SpecDecodeMetrics(3, 12, [3, 1], 7)
    assert made.requests[0].metrics == SpecDecodeMetrics(1, 4, [1, 1], 3)


def test_timing_is_from_the_first_sample_to_the_last():
    made = prompt_run(SamplingParams(n=2))
    first, second = made.requests
    first.times, first.output = Times(10.0, 11.0, 12.0, 13.0, 14.0), [1] * 3
    second.times, second.output = Times(10.0, 14.0, 14.5, 15.0, 19.0), [1] * 4
    t = timing_of(made.requests)
    assert (t.queue_seconds, t.prefill_seconds, t.decode_seconds, t.time_to_first_token) == (1.0, 1.0, 7.0, 3.0)
    assert t.time_per_output_token == (19.0 - 13.0) / 3


@pytest.mark.parametrize(("errors", "said"), [((), None), ((1,), "1 of 3 "), ((0, 2), "2 of 3 ")])
def test_failures_are_counted_and_the_first_is_told(errors, said):
    made = [prompt_run() for _ in range(3)]
    for i, m in enumerate(made):
        m.requests[0].finish_reason, m.requests[0].error = ("error", f"e{i}") if i in errors else ("abort", None)
    line = failures(m.output() for m in made)
    assert line == (said and f"{said}completions ended with an error, the first: e{errors[0]}")

"""Where a greedy text ends: at the context's end, at a stop id or max_tokens, also inside a run of accepted drafts."""

from __future__ import annotations

import pytest

from tests.support.lively_models import FAMILY, PROMPTS, VOCAB, engine, params, plain, repeating, serve, texts

K = 4


@pytest.mark.parametrize(
    ("method", "family"), [("plain", "llama"), *((m, FAMILY[m]) for m in ("itself", "noisy", "ngram"))]
)
def test_the_whole_context_is_used(method, family):
    """Up to max_model_len exactly, and with K = 4 to one token before the limits of a page."""
    prompts = (*PROMPTS, repeating(63, 5, 4), repeating(62, 5, 5), repeating(58, 4, 6))
    sampling = tuple(params((100,) * 8))
    requests = serve(engine(method, K * (method != "plain"), family), prompts, sampling)
    assert [len(r.tokens) for r in requests] == [64] * 8
    assert {r.finish_reason for r in requests} == {"length"}
    assert texts(requests) == plain(prompts, sampling, family)


@pytest.mark.parametrize("method", ["itself", "noisy", "ngram"])
def test_one_token(method):
    sampling = tuple(params((1,) * 5))
    requests = serve(engine(method, K, FAMILY[method]), PROMPTS, sampling)
    assert texts(requests) == plain(PROMPTS, sampling, FAMILY[method])
    assert all(r.metrics.num_accepted_tokens_per_pos in ([1, 0, 0, 0], [0, 0, 0, 0]) for r in requests)


@pytest.mark.parametrize("at", range(11))
def test_a_stop_id_cuts_an_accepted_run(at):
    """What was accepted after the stop id is dropped, from the text and from the counters."""
    plain_text = plain(PROMPTS[3:], tuple(params((30, 30))))[1]
    stop = plain_text[at]
    at = plain_text.index(stop)
    requests = serve(
        engine("itself", K), PROMPTS[3:], [*params(30), *params(30, stop_token_ids=[VOCAB - 1 - stop, stop])]
    )
    expected = next(i for i, token in enumerate(plain_text) if token in (stop, VOCAB - 1 - stop)) + 1
    assert requests[1].output == plain_text[:expected]
    assert requests[1].finish_reason == "stop"
    full, rest = divmod(expected, K + 1)
    accepted = [full + (i < rest) for i in range(K)]
    assert requests[1].metrics.num_accepted_tokens_per_pos == accepted
    assert requests[1].metrics.num_drafts == full + (rest > 0)
    assert requests[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_cuts_an_accepted_run(max_tokens):
    requests = serve(engine("itself", K), PROMPTS[:2], params((max_tokens, 12)))
    full, rest = divmod(max_tokens, K + 1)
    m = requests[0].metrics
    assert m.num_accepted_tokens_per_pos == [full + (i < rest) for i in range(K)]
    assert (m.num_drafts, m.num_draft_tokens) == (full + (rest > 0), K * (full + (rest > 0)))
    assert m.num_emitted_tokens == len(requests[0].output) == max_tokens
    assert requests[0].finish_reason == "length"


def test_the_last_allowed_token_may_be_a_stop_id():
    """A row that reaches both at once has stopped."""
    text = plain(PROMPTS[3:], tuple(params((30, 30))))[0]
    at = next(i for i in range(2, 30) if text[i] not in text[:i])
    requests = serve(engine("itself", K), PROMPTS[3:], params((at + 1, 2), stop_token_ids=[text[at]]))
    assert (requests[0].finish_reason, requests[0].output) == ("stop", text[: at + 1])
    requests = serve(engine("itself", K), PROMPTS[3:], params((at, 2), stop_token_ids=[text[at]]))
    assert (requests[0].finish_reason, requests[0].output) == ("length", text[:at])


def test_ignore_eos_ignores_the_models_ids_only():
    text = plain(PROMPTS[3:], tuple(params((30, 30))))[0]
    fresh = [i for i in range(30) if text[i] not in text[:i]]
    eos, own = text[fresh[2]], text[fresh[4]]
    cases = {
        fresh[2]: params((30, 30)),
        29: params((30, 30), ignore_eos=True),
        fresh[4]: params((30, 30), ignore_eos=True, stop_token_ids=[own]),
    }
    for last, sampling in cases.items():
        request = serve(engine("noisy", K), PROMPTS[3:], sampling, stop_ids=(eos,))[0]
        assert request.output == text[: last + 1]
        assert request.finish_reason == ("length" if last == 29 else "stop")


def test_many_stop_ids_need_a_wider_table():
    text = plain(PROMPTS[3:], tuple(params((30, 30))))[0]
    unused = [i for i in range(VOCAB) if i not in text]
    requests = serve(engine("noisy", K), PROMPTS[3:], params((30, 30), stop_token_ids=[*unused[:8], text[6]]))
    assert requests[0].output == text[: text.index(text[6]) + 1]

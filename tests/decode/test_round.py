"""One launch at a time, with block tables and limits that the engine would not give: pausing, early return, writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import fetch
from jaxspec.options.engine import MAX_ROUNDS
from tests.support.lively_models import OPTIONS, PROMPTS, engine, new_engine, params, plain, texts

K = 4
PAGE = 16
SHAPE = (8, 4)  # the shape that other tests compile


def start(engine: Engine, prompts, sampling) -> list[Request]:
    """Admits and prefills, launches nothing."""
    requests = [engine.add(p, s) for p, s in zip(prompts, sampling, strict=True)]
    engine.shape = SHAPE
    engine.admit()
    while engine.prefilling.unread:
        engine.prefill()
    engine.scheduler.grow(MAX_ROUNDS)
    return requests


def launch(engine: Engine, requests: list[Request], rounds: int = MAX_ROUNDS):
    """One launch, its result taken in; (result, tokens that each row gained)."""
    known = [r.num_tokens for r in requests]
    result = fetch(engine.runner.start(engine.launch(requests, engine.num_drafts, rounds)))
    engine.apply_result(requests, result)
    return result, [r.num_tokens - n for r, n in zip(requests, known, strict=True)]


def row_pages(cache, pages: list[int]) -> list[np.ndarray]:
    return [np.asarray(leaf)[pages] for leaf in jax.tree.leaves(cache)]


@pytest.mark.parametrize("method", ["itself", "noisy", "ngram"])
def test_a_row_without_pages_pauses(method):
    """It drops no writes and drafts no less; given pages, it goes on as if nothing had been."""
    prompts, sampling = PROMPTS[1:4], params((30, 30, 30))
    shared = engine(method, K)
    requests = start(shared, prompts, sampling)
    held = [r.pages for r in requests]
    assert [len(pages) for pages in held] == [3, 3, 4]

    requests[0].pages, requests[2].pages = held[0][:1], held[2][:2]
    _, gained = launch(shared, requests)
    # Each stops before a round whose K_b + 1 positions its pages do not cover, and not earlier.
    for i, pages in ((0, 1), (2, 2)):
        assert pages * PAGE - K < requests[i].num_tokens <= pages * PAGE + 1
        assert requests[i].finish_reason is None
        if method != "ngram":
            assert requests[i].metrics.num_draft_tokens == K * requests[i].metrics.num_drafts
    assert gained[1] == 30
    assert requests[1].finish_reason == "length"

    paused = [requests[0], requests[2]]
    before = [
        (list(r.tokens), r.draft_len, r.metrics.as_dict(), row_pages(shared.runner.cache, r.pages)) for r in paused
    ]
    result, gained = launch(shared, paused)
    assert (gained, int(result.num_rounds)) == ([0, 0], 0)
    for request, (tokens, draft_len, metrics, pages) in zip(paused, before, strict=True):
        assert (request.tokens, request.draft_len, request.metrics.as_dict()) == (tokens, draft_len, metrics)
        assert all(
            np.array_equal(a, b) for a, b in zip(row_pages(shared.runner.cache, request.pages), pages, strict=True)
        )

    # One of them gets pages: the other stays as it is, though rounds are run beside it.
    requests[2].pages = held[2]
    _, gained = launch(shared, paused)
    assert gained[0] == 0
    tokens, draft_len, metrics, pages = before[0]
    assert (requests[0].tokens, requests[0].draft_len, requests[0].metrics.as_dict()) == (tokens, draft_len, metrics)
    assert all(
        np.array_equal(a, b) for a, b in zip(row_pages(shared.runner.cache, requests[0].pages), pages, strict=True)
    )
    assert requests[2].finish_reason == "length"

    requests[0].pages = held[0]
    launch(shared, requests[:1])
    assert texts(requests) == plain(prompts, tuple(sampling))
    if method == "itself":
        assert all(r.metrics.num_accepted_tokens_per_pos == [6] * K for r in requests)


def emptied() -> Engine:
    """An engine that some tests share, its pages all zeros."""
    found = engine("itself", K)
    found.scheduler.allocator.reset()
    found.runner.cache = jax.tree.map(jnp.zeros_like, found.runner.cache)
    return found


@pytest.mark.parametrize("wanted", range(K + 1))
def test_what_a_round_writes(wanted):
    """K_b + 1 positions of the target, K_b of the draft (at least the pending token), nothing after them."""
    fresh = emptied()
    requests = start(fresh, PROMPTS[2:4], params((20, 20)))
    requests[0].num_speculative_tokens = wanted  # only now: the draft reads no prompt of a row that wants none
    before = [r.num_tokens for r in requests]
    launch(fresh, requests, rounds=1)
    used = [np.abs(np.asarray(leaf)).sum(axis=(2, 3)) > 0 for leaf in jax.tree.leaves(fresh.runner.cache)]
    for request, length, k in zip(requests, before, (wanted, K), strict=True):
        for leaf, count in zip(used, [length + k] * 2 + [length - 1 + max(k, 1)] * 2, strict=True):
            positions = leaf[request.pages].reshape(-1)
            assert positions[:count].all()
            assert not positions[count:].any()
    mine = {page for r in requests for page in r.pages}
    others = [page for page in range(OPTIONS["num_pages"]) if page not in mine]
    assert not any(leaf[others].any() for leaf in used)
    for request in requests:
        fresh.abort(request)


def test_the_draft_cache_keeps_up():
    """draft_len after a round: all but the last accepted token after full acceptance, else all that is committed."""
    shared = engine("itself", K)
    requests = start(shared, PROMPTS[2:4], params((30, 30)))
    launch(shared, requests, rounds=1)
    assert [r.draft_len for r in requests] == [r.num_tokens - 2 for r in requests]
    launch(shared, requests)
    shared = engine("wrong", K)
    requests = start(shared, PROMPTS[2:4], params((30, 30)))
    launch(shared, requests, rounds=3)
    assert [r.draft_len for r in requests] == [r.num_tokens - 1 for r in requests]
    launch(shared, requests)
    assert not shared.busy


def test_one_finished_row_ends_the_launch_if_asked_to():
    shared = engine("itself", K)
    sampling = params((4 * (K + 1), 2 * (K + 1) - 1, 30))
    for someone_waits, rounds in ((True, 2), (False, 6)):
        requests = start(shared, PROMPTS[1:4], sampling)
        if someone_waits:
            waiting = shared.add(PROMPTS[0], sampling[0])
        result, gained = launch(shared, requests)
        assert int(result.num_rounds) == rounds
        assert gained == [min(s.max_tokens, rounds * (K + 1)) for s in sampling]
        for request in [*requests, waiting]:
            shared.abort(request)


@pytest.fixture(scope="module")
def roomy():
    return new_engine("wrong", K, max_model_len=128, num_pages=64)


@pytest.mark.parametrize(("asked", "done"), [(1, 1), (3, 3), (32, 32), (1000, MAX_ROUNDS)])
def test_the_number_of_rounds_is_data(roomy, asked, done):
    requests = start(roomy, PROMPTS[1:3], params((90, 90)))
    launch(roomy, requests, 2)  # compiles, where no other test has
    compiled = roomy.runner.programs.num_compiled
    result, gained = launch(roomy, requests, asked)
    assert int(result.num_rounds) == done
    assert gained == [done, done]  # a round of a draft that is always wrong yields one token
    assert roomy.runner.programs.num_compiled == compiled
    for request in requests:
        roomy.abort(request)


def test_the_result_has_room_for_all_rounds():
    """MAX_ROUNDS rounds of K + 1 tokens fit into one result."""
    long = new_engine("itself", 1, max_model_len=256, num_pages=64)
    requests = start(long, PROMPTS[1:3], params((150, 150)))
    result, gained = launch(long, requests, 1000)
    assert gained == [2 * MAX_ROUNDS] * 2
    assert result.new_tokens.shape[1] == 2 * MAX_ROUNDS

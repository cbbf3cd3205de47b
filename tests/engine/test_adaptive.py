"""How many drafts: the controller with made-up costs, and engines whose outputs must not depend on what it chooses."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from jaxspec.decode.state import LaunchResult
from jaxspec.engine.adaptive import (
    FIRST_PAUSE,
    LONG_MEMORY,
    LONGEST_PAUSE,
    PROBE_ROUNDS,
    Acceptance,
    Choice,
    Controller,
    chances,
)
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.results import keep_count
from jaxspec.options.engine import MAX_ROUNDS
from jaxspec.options.sampling_params import SamplingParams
from tests.support.lively_models import new_engine, params, plain, repeating, serve, texts
from tests.support.sizes import cases

K = 4
CHOICES = (0, 2, 4)
PROMPTS = (repeating(7, 3, 1), repeating(16, 5, 2), (9,))
SAMPLINGS = (
    tuple(params((40, 30, 35))),
    tuple(SamplingParams(max_tokens=n, seed=n, temperature=0.8) for n in (40, 30, 35)),
)


def row(accepted: int, rounds: int = 500, most: int = K) -> tuple[int, Acceptance]:
    """A row whose every round accepted so many of K drafts."""
    found = Acceptance(K)
    found.observe(np.full(rounds, accepted), K)
    return most, found


def controller(*costs: float, **options) -> Controller:
    """costs: seconds of a round with 0, 2, 4 drafts."""
    found = Controller(CHOICES, **options)
    found.seconds = 1e6  # time enough to look around
    found.overall.observe(np.repeat([0, 4], 50), K)  # and something seen
    found.costs = {("kind", k): cost for k, cost in zip(CHOICES, costs, strict=False)}
    return found


@pytest.mark.parametrize(
    ("costs", "accepted", "k"),
    [
        ((1.0, 1.2, 1.4), (4,), 4),
        ((1.0, 1.2, 1.4), (0,), 0),
        ((1.0, 3.5, 6.0), (4,), 0),
        ((1.0, 1.4, 1.8), (2,), 2),
        ((1.0, 1.4, 1.8), (2, 4, 4), 4),
        ((1.0, 1.4, 1.8), (0, 0, 0, 2), 2),
        ((1.0, 1.4, 1.8), (0, 0, 0, 0, 1), 0),
        ((1.0, 2.97, 5.0), (2,), 0),  # a gain of a hundredth is noise
        ((1.0, 2.80, 5.0), (2,), 2),
    ],
)
def test_the_most_tokens_a_second(costs, accepted, k):
    c = controller(*costs)
    choice = c.choose("kind", [row(a) for a in accepted])
    assert choice.k == k
    if k:
        assert choice.worth == pytest.approx(costs[CHOICES.index(k)] / costs[0])
    assert choice.num_rounds in (FIRST_PAUSE, None)


@pytest.mark.parametrize(("most", "k"), [((0,), 0), ((1,), 2), ((2, 1), 2), ((3,), 4), ((), 0)])
@pytest.mark.parametrize("how", ["pinned", "fixed", "unmeasured"])
def test_rows_that_want_fewer(most, k, how):
    """Without a choice to make it is the smallest program that serves all."""
    c = Controller(CHOICES, adaptive=how != "fixed")
    choice = c.choose("kind", [row(0, most=m) for m in most], pinned=how == "pinned")
    assert choice == Choice(k, 1 if how == "unmeasured" and k else None)


def test_pinned_rows_keep_k_whatever_it_costs():
    assert controller(1.0, 5.0, 9.0).choose("kind", [row(0)], pinned=True) == Choice(K)


@pytest.mark.parametrize(
    ("draft_cost", "accepted", "k"), [(0.5, 4, 4), (0.5, 2, 0), (0.0, 2, 4), (0.0, 0, 0), (1.0, 4, 0)]
)
def test_plain_decoding_is_measured_only_where_it_could_win(draft_cost, accepted, k):
    c = Controller(CHOICES, draft_cost=draft_cost)
    c.costs = {("kind", 4): 1.0, ("other", 0): 1.0}
    choice = c.choose("kind", [row(accepted)])
    assert choice == (Choice(0, 1) if k == 0 else Choice(K))


def test_pauses_between_looks_double():
    """Speculation that loses is looked at again ever more rarely."""
    c, rows, pauses = controller(1.0, 1.5, 2.0), [row(0)], []
    while len(pauses) < 7:
        choice = c.choose("kind", rows)
        if choice.k:
            assert choice.num_rounds == PROBE_ROUNDS
            pauses.append(0)
            c.observe("kind", choice.k, PROBE_ROUNDS * c.costs["kind", choice.k], PROBE_ROUNDS, tokens=PROBE_ROUNDS)
        else:
            done = min(16, choice.num_rounds)
            pauses = pauses or [0]
            pauses[-1] += done
            c.observe("kind", 0, done * 1.0, done, tokens=done)
    assert pauses[:6] == [32, 64, 128, 256, 512, 512]
    assert LONGEST_PAUSE == 512


def test_looks_cost_a_small_share_of_the_time():
    """However eager newcomers make it: never much more than plain decoding would have taken."""
    c, plain_time, seconds = Controller(CHOICES), 0.0, 0.0
    costs = {0: 1.0, 2: 1.5, 4: 2.0}
    c.overall.observe(np.zeros(500, int), K)
    for _ in range(2000):
        choice = c.choose("kind", [row(0), (K, Acceptance(K))])
        done, catch_up = min(16, choice.num_rounds or 16), 3.0 if choice.k else 0.0
        c.observe("kind", choice.k, done * costs[choice.k], done, tokens=2 * done, catch_up=catch_up)
        seconds, plain_time = seconds + done * costs[choice.k] + catch_up, plain_time + done
    assert 1.002 < seconds / plain_time < 1.012


def test_a_look_that_finds_something_ends_the_pause():
    c, rows = controller(1.0, 1.2, 1.4), [row(0)]
    c.choose("kind", rows)
    c.observe("kind", 0, 32.0, 32, tokens=32)
    assert c.choose("kind", rows).k == 2
    rows[0][1].observe(np.full(100, 4), K)
    assert c.choose("kind", rows).k == K
    rows[0][1].observe(np.zeros(200, int), K)
    assert c.choose("kind", rows) == Choice(0, num_rounds=FIRST_PAUSE)


def test_newcomers_get_a_look():
    """Whoever has not been seen waits for the first pause only, however long the others' has become."""
    c = controller(1.0, 3.0, 5.0)
    c.choose("kind", [row(0)])
    c.pause = LONGEST_PAUSE
    c.observe("kind", 0, 40.0, 40, tokens=40)
    assert c.choose("kind", [row(0)]).k == 0
    assert c.choose("kind", [row(0), (K, Acceptance(K))]).k > 0


def test_costs_follow_what_is_measured():
    c = Controller(CHOICES)
    c.observe("kind", 2, 80.0, 4, tokens=8)
    assert not c.once, "the first launch is slow for reasons of its own"
    c.observe("kind", 2, 8.0, 4, tokens=8)
    assert not c.costs, "one may be disturbed"
    c.observe("kind", 2, 30.0, 4, tokens=8)
    assert c.costs["kind", 2] == 2.0
    c.observe("kind", 2, 4.0, 4, tokens=8)
    assert c.costs["kind", 2] == 1.5, "faster counts more"
    c.observe("kind", 2, 10.0, 4, tokens=8)
    assert c.costs["kind", 2] == pytest.approx(1.7)
    c.observe("kind", 2, 10.0, 0, tokens=8)
    assert c.costs == {("kind", 2): pytest.approx(1.7)}
    c.costs |= {("kind", 0): 1.0, ("kind", 4): 3.0}
    del c.costs["kind", 2]
    assert c.cost("kind", 2, 4) == 2.0


@pytest.mark.parametrize("k", CHOICES)
@pytest.mark.parametrize("disturbed", [2, 3])
def test_one_disturbed_measurement_decides_nothing(k, disturbed):
    """The second or the third launch of each k, by 200 rounds: the best is found all the same, and soon."""
    costs, gain, seen = {0: 1.0, 2: 1.4, 4: 1.8}, {0: 0, 2: 2, 4: 4}[k], dict.fromkeys(CHOICES, 0)
    if k == 0:
        costs |= {2: 2.6, 4: 5.2}
    if k == 2:
        costs[4] = 3.2
    c, rows = Controller(CHOICES, draft_cost=1.0), [row(gain, rounds=40)]
    c.overall.observe(np.full(40, gain), K)
    for _ in range(12):
        choice = c.choose("kind", rows)
        done = choice.num_rounds or 16
        seen[choice.k] += 1
        late = 200.0 if seen[choice.k] == disturbed else 0.0
        c.observe("kind", choice.k, done * costs[choice.k] + late, done, tokens=done * (1 + min(gain, choice.k)))
    assert c.best == k
    assert seen[k] >= 4


@pytest.mark.parametrize(("cost", "rounds"), [(0.004, 5), (0.021, 1), (0.5, 1)])
def test_rounds_of_a_launch_that_is_waited_for(cost, rounds):
    c = Controller((0, 3))
    assert c.rounds_within(0.02, "kind", 3) == 1, "nothing is known"
    c.costs["kind", 3] = cost
    assert c.rounds_within(0.02, "kind", 3) == rounds


def test_acceptance_by_position():
    """Each position among the rounds that came so far; what was not seen is the prior."""
    a = Acceptance(4)
    seen = lambda prior=0.5: chances(a.tries, a.hits, prior, 2.0)
    assert seen().tolist() == [0.5] * 4
    a.observe(np.array([0, 1, 2, 2] * 200), 2)
    assert seen() == pytest.approx([0.75, 2 / 3, 0.5, 0.5], abs=0.05)
    a.observe(np.full(200, 4), 4)
    assert (seen() > 0.95).all(), "newer rounds count more"
    a.observe(np.full(200, 0), 4)
    assert seen(np.array([0.1, 0.9, 0.9, 0.9]))[0] < 0.05


@functools.cache
def own(**spec) -> Engine:
    found = new_engine("noisy", K, enable_prefix_caching=False, spec={"adaptive": True, **spec})
    found.grown_shape = lambda *requests: (4, 4)
    return found


def with_choices(monkeypatch, *ks: int) -> list[int]:
    """Launches have these numbers of drafts, again and again -> those of the launches to come."""
    coming, used = itertools.cycle(ks), []

    def choose(kind, rows, *, pinned=False):
        used.append(next(coming))
        return Choice(used[-1])

    monkeypatch.setattr(own().controller, "choose", choose)
    return used


@cases("sampling", SAMPLINGS, quick=SAMPLINGS[:1], ids=["greedy", "seeded"])
@cases("ks", [(0, 4), (4, 0, 2), (2, 0, 0, 4), (0,)], quick=[(4, 0, 2)])
def test_outputs_do_not_depend_on_the_choice(ks, sampling, monkeypatch):
    used = with_choices(monkeypatch, *ks)
    requests = serve(own(), PROMPTS, sampling, rounds=3)
    assert texts(requests) == plain(PROMPTS, sampling)
    assert set(used) == set(ks)


def test_measured_seconds_decide(monkeypatch):
    """Free drafts are always taken, ruinous ones given up."""
    observe = Controller.observe
    for cost, expected in ((0.0, {K}), (50.0, {0})):
        found, used = own(), []
        monkeypatch.setattr(found, "controller", Controller(CHOICES, draft_cost=0.5))
        launch = functools.partial(Engine.launch, found)

        def seen(requests, k, *rest, launch=launch, used=used):
            used.append(k)
            return launch(requests, k, *rest)

        def measured(kind, k, seconds, rounds, c=found.controller, cost=cost, **rest):
            observe(c, kind, k, (1 + cost * k) * rounds, rounds, **rest)

        monkeypatch.setattr(found, "launch", seen)
        monkeypatch.setattr(found.controller, "observe", measured)
        assert texts(serve(found, PROMPTS, SAMPLINGS[0], rounds=2)) == plain(PROMPTS, SAMPLINGS[0])
        assert set(used[6:10]) == expected, used


@pytest.mark.parametrize("paused", [1, 2, 9, 20])
def test_the_draft_catches_up(paused, monkeypatch):
    """After rounds without speculation exactly as many drafts are accepted as of a request that begins there."""
    found, prompts = own(), PROMPTS[:2]
    with_choices(monkeypatch, K)
    requests = [found.add(p, s) for p, s in zip(prompts, params((45, 38)), strict=True)]
    found.step(1)
    with_choices(monkeypatch, 0)
    found.step(paused)
    with_choices(monkeypatch, K)
    before = [(r.tokens, list(r.metrics.num_accepted_tokens_per_pos), r.metrics.num_drafts) for r in requests]
    while found.busy:
        found.step(4)
    left = params([r.num_tokens - len(tokens) for r, (tokens, _, _) in zip(requests, before, strict=True)])
    others = serve(found, [tokens for tokens, _, _ in before], left, rounds=4)
    for request, other, (tokens, accepted, drafts) in zip(requests, others, before, strict=True):
        assert tokens + other.output == request.tokens
        m = other.metrics
        assert [a - b for a, b in zip(request.metrics.num_accepted_tokens_per_pos, accepted, strict=True)] == (
            m.num_accepted_tokens_per_pos
        )
        assert request.metrics.num_drafts - drafts == m.num_drafts
        assert m.num_accepted_tokens > 0


def test_no_speculation_in_large_batches(monkeypatch):
    """While disable_by_batch_size requests are running; whoever is left speculates again."""
    found = own()
    monkeypatch.setattr(found, "speculative", found.speculative.__class__(model="x", disable_by_batch_size=2))
    monkeypatch.setattr(found, "controller", Controller(CHOICES, adaptive=False))
    sampling = tuple(params((40, 10)))
    long, short = (found.add(p, s) for p, s in zip(PROMPTS[:2], sampling, strict=True))
    while short.finish_reason is None:
        found.step(4)
        assert long.metrics.num_drafts == short.metrics.num_drafts == 0
    while found.busy:
        found.step(4)
    assert long.metrics.num_drafts > 0 == short.metrics.num_drafts
    assert [long.output, short.output] == plain(PROMPTS[:2], sampling)


def test_a_launch_is_counted_as_if_row_by_row():
    """Rows that draft as many as others, fewer, or nothing; rounds in which a row gained nothing."""
    rng, rows = np.random.default_rng(1), 6
    accepted = rng.integers(0, K + 1, (rows, MAX_ROUNDS))
    emitted = np.where(rng.random((rows, MAX_ROUNDS)) < 0.7, accepted + 1, 0)
    own = [K, 1, 0, K, 2, 1]
    accepted = np.minimum(accepted, np.array(own)[:, None])
    zeros = np.zeros(rows, np.int32)
    result = LaunchResult(
        new_tokens=np.zeros((rows, MAX_ROUNDS * (K + 1)), np.int32),
        num_new=emitted.sum(axis=1),
        finish=zeros,
        draft_len=zeros,
        proposed=accepted,
        accepted=accepted,
        emitted=emitted,
        looked_up=np.zeros_like(emitted),
        num_rounds=np.int32(MAX_ROUNDS),
    )
    engine = new_engine("plain", 0)
    requests = [engine.add([5], SamplingParams(max_tokens=3)) for _ in own]
    expected, together = [Acceptance(K) for _ in own], Acceptance(K, LONG_MEMORY)
    for row, (request, k) in enumerate(zip(requests, own, strict=True)):
        request.num_speculative_tokens, request.acceptance = k, Acceptance(K)
        if k:
            expected[row].observe(accepted[row, emitted[row] > 0], k)
    for k in (1, 2, K):
        together.observe(np.concatenate([accepted[r, emitted[r] > 0] for r in range(rows) if own[r] == k]), k)
    overall, metrics = Acceptance(K, LONG_MEMORY), SpecDecodeMetrics(num_accepted_tokens_per_pos=[0] * K)
    keep_count(requests, result.num_new.tolist(), result, metrics, overall)
    for found, wanted in zip([*(r.acceptance for r in requests), overall], [*expected, together], strict=True):
        np.testing.assert_allclose(found.tries, wanted.tries)
        np.testing.assert_allclose(found.hits, wanted.hits)
    assert overall.hits.any()

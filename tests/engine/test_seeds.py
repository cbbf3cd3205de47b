"""Seeded requests through the engine: their own tokens, whatever drafts, however long a launch, whoever shares."""

from __future__ import annotations

import pytest

from jaxspec.options.sampling_params import SamplingParams
from tests.support.lively_models import (
    FAMILY,
    MAX_TOKENS,
    PROMPTS,
    engine,
    new_engine,
    params,
    plain,
    serve,
    texts,
    total,
)
from tests.support.sizes import cases

K = 3
STANDARD = {"rejection_sample_method": "standard"}
RULES = {"standard": STANDARD, "block": {"rejection_sample_method": "block"}}  # with numbers of the round's own
FILTERS = ({"temperature": 0.0}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.4}, {"temperature": 0.7})
FILTERED = tuple(SamplingParams(max_tokens=20, seed=-2 - i, **f) for i, f in enumerate(FILTERS))


def seeded(**options) -> tuple[SamplingParams, ...]:
    return tuple(SamplingParams(max_tokens=n, seed=100 + i, **options) for i, n in enumerate(MAX_TOKENS))


CASES = [
    (method, k, sampling)
    for method, k in (("noisy", 4), ("first_layer", 1), ("ngram", 3), ("ngram", 6))
    for sampling in (seeded(temperature=0.2 if method == "ngram" else 0.8), FILTERED)
]


@cases(
    ("method", "k", "sampling"),
    [*CASES, ("wrong", 2, seeded())],
    quick=[("noisy", 4, FILTERED)],
    rest=[("ngram", 3, FILTERED), ("wrong", 2, seeded())],
)
def test_coupled_equals_plain(method, k, sampling):
    expected = plain(PROMPTS, sampling, FAMILY[method])
    for rounds in (1, 4, 32):
        requests = serve(engine(method, k, FAMILY[method]), PROMPTS, sampling, rounds=rounds)
        assert texts(requests) == expected, f"{rounds} rounds a launch"
    assert sum(total(requests)) > 0 or method == "wrong"


def test_a_model_drafting_for_itself_under_shared_noise_is_always_right():
    """Draft and target draw from the same vector at each position, so equal models cannot differ."""
    sampling = tuple(SamplingParams(max_tokens=20, seed=i, temperature=1.2) for i in range(5))
    requests = serve(engine("itself", 4), PROMPTS, sampling)
    assert texts(requests) == plain(PROMPTS, sampling)
    assert total(requests) == [20] * 4


def test_minus_one_is_no_seed():
    """As in vLLM; any other number is one."""
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2
    first, second = (engine().add(PROMPTS[0], SamplingParams(seed=-1)) for _ in range(2))
    assert first.seed != second.seed
    assert first.rule == "block"
    for request in (first, second):
        engine().abort(request)


def test_seeds_matter():
    greedy = plain(PROMPTS, tuple(params()))
    one, two = (plain(PROMPTS, seeded(temperature=t)) for t in (0.8, 1.3))
    same = (PROMPTS[3],) * 3
    a, b, c = texts(serve(engine(), same, [SamplingParams(max_tokens=20, seed=s) for s in (1, 2, 1)]))
    assert a == c != b
    assert one != greedy != two != one


@pytest.mark.thorough
@pytest.mark.usefixtures("exact_shapes")
def test_coupled_alone_equals_coupled_in_company():
    """One row's drafts are verified K + 1 at a time, so even the lone row's target products have several rows."""
    sampling = seeded(temperature=0.8)
    expected = plain(PROMPTS, sampling)
    for i in (0, 3):
        assert serve(engine("noisy", 4), [PROMPTS[i]], [sampling[i]])[0].output == expected[i]


@cases(("rule", "method"), [(r, m) for r in RULES for m in ("noisy", "ngram")], quick=[("standard", "ngram")])
@pytest.mark.usefixtures("exact_shapes")
def test_a_rounds_own_numbers_do_not_depend_on_company_or_rounds(rule, method):
    """Keys are counters, not a stream: the same seed gives the same tokens in any batch, row and launch length."""
    own, sampling = new_engine(method, K, spec=RULES[rule]), seeded(temperature=0.9)
    alone = texts(serve(own, PROMPTS, sampling, rounds=32))
    for rounds in (1, 5):
        assert texts(serve(own, PROMPTS, sampling, rounds=rounds)) == alone
    assert texts(serve(own, PROMPTS[::-1], sampling[::-1], rounds=2)) == alone[::-1]
    for i in (1, 4):
        strangers = [*params(9, seed=77, temperature=1.0), *params(30)]
        mixed = serve(own, [PROMPTS[2], PROMPTS[i], PROMPTS[0]], [strangers[0], sampling[i], strangers[1]])
        assert mixed[1].output == alone[i]
    assert alone != plain(PROMPTS, sampling), "such a rule draws other tokens than the coupled one"


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_ids_that_the_draft_lacks(rule):
    """A draft without some of the target's ids keeps a finite q, and is accepted for the others."""
    lacking = new_engine("fewer_ids", K, spec=RULES[rule])
    requests = serve(lacking, PROMPTS, seeded(temperature=0.9))
    assert max(token for tokens in texts(requests) for token in tokens) >= 56
    assert sum(total(requests)) > 0


def test_every_kind_of_row_in_one_batch():
    """Greedy and coupled rows, and rows without a seed, with filters and K of their own, do not disturb each other."""
    greedy, coupled = params(20)[0], SamplingParams(max_tokens=20, seed=3, top_k=12)
    off = SamplingParams(max_tokens=20, seed=3, top_k=12, num_speculative_tokens=0)
    free = SamplingParams(max_tokens=20)
    requests = serve(engine("noisy", 4), PROMPTS, [greedy, coupled, free, off, greedy])
    expected = plain(PROMPTS, (greedy, coupled, greedy, off, greedy))
    for i in (0, 1, 3, 4):
        assert requests[i].output == expected[i]
    assert len(requests[2].output) == 20
    assert requests[3].metrics.num_drafts == 0


def test_a_seed_under_the_standard_rule_is_no_matter_of_how_many_run():
    """Speculation is off for a full batch, but not where a seeded request's tokens depend on it."""
    own = new_engine("noisy", 4, spec={**STANDARD, "disable_by_batch_size": 2, "adaptive": True}, max_num_seqs=4)
    own.grown_shape = lambda *requests: (4, 4)
    sampling = seeded(temperature=0.9)
    alone = [serve(own, [p], [s])[0].output for p, s in zip(PROMPTS[:3], sampling, strict=False)]
    together = serve(own, PROMPTS[:3], sampling[:3])
    assert texts(together) == alone
    assert sum(r.metrics.num_draft_tokens for r in together) > 0
    unseeded = serve(own, PROMPTS[:3], params((9, 9, 9), temperature=0.9))
    assert sum(r.metrics.num_draft_tokens for r in unseeded[:2]) == 0

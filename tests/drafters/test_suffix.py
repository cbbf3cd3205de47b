"""Suffix decoding against a few lines of Python that keep lists."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache.pages import PagedKVCache
from jaxspec.drafters.suffix import Suffix
from jaxspec.options.sampling_params import SamplingParams
from tests.drafters.histories import history
from tests.drafters.rounds import recording
from tests.support.lively_models import PROMPTS, new_engine, params, plain, serve, texts

B, M, K = 8, 40, 6  # rows, room of a row's history, drafts


def reference(tokens: list[int], k: int, drafter: Suffix) -> list[int]:
    """For every length of a match: where it ended before, and what followed most often, by what is left of these
    places. The run with the largest sum of its probabilities, of equals the one after the longest match."""

    def agree(end: int) -> int:
        n = 0
        while n < drafter.depth - 1 and n <= end and tokens[end - n] == tokens[-1 - n]:
            n += 1
        return n

    ends = sorted(range(len(tokens) - 1), key=lambda end: (-agree(end), -end))[: drafter.most]
    best, score = [], np.float32(0)
    for length in range(1, drafter.depth):
        at, run, sure, total = [end for end in ends if agree(end) >= length], [], np.float32(1), np.float32(0)
        while len(run) < min(k, int(length * drafter.factor + 1e-6), drafter.depth - length):
            at = [end for end in at if end + 1 + len(run) < len(tokens)]
            if not at:
                break
            next_of = [tokens[end + 1 + len(run)] for end in at]
            token, votes = Counter(next_of).most_common(1)[0]  # of equals the one that comes first
            sure = sure * np.float32(votes) / np.float32(len(at))
            if sure < np.float32(drafter.min_prob):
                break
            at = [end for end, other in zip(at, next_of, strict=True) if other == token]
            run.append(token)
            total += sure
        if total >= score and run:
            best, score = run, total
    return best


def propose(drafter: Suffix, histories: list[list[int]], wanted=K, live=True, rubbish: int = 0) -> list[list[int]]:
    """The proposals of B rows; `rubbish` fills what lies beyond each history."""
    proposal = run(drafter, history(histories, M, wanted, live, rubbish))
    assert proposal.probs is None
    assert proposal.tokens.shape == (B, drafter.num_speculative_tokens)
    return [t[:n].tolist() for t, n in zip(np.asarray(proposal.tokens), np.asarray(proposal.num_proposed), strict=True)]


def no_model(logits, i):
    raise AssertionError("suffix decoding has nothing to sample from")


run = jax.jit(lambda drafter, rows: drafter.propose({}, PagedKVCache(()), rows, no_model)[0], static_argnums=0)
one_row = st.lists(st.integers(0, 2), min_size=1, max_size=M - 1)
DRAFTERS = [
    Suffix(K),
    Suffix(K, depth=6, factor=2.5, min_prob=0.4),
    Suffix(K, depth=5, factor=64.0, min_prob=0.0, most=4),
    Suffix(K, depth=2),
]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=range(len(DRAFTERS)))
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_the_run_that_is_expected_to_be_right_longest(drafter, data):
    histories = data.draw(st.lists(one_row, min_size=B, max_size=B))
    wanted = data.draw(st.lists(st.integers(0, K), min_size=B, max_size=B))
    live = data.draw(st.lists(st.booleans(), min_size=B, max_size=B))
    rubbish = data.draw(st.integers(0, 2))
    expected = [reference(h, w, drafter) if alive else [] for h, w, alive in zip(histories, wanted, live, strict=True)]
    assert propose(drafter, histories, wanted, live, rubbish) == expected


# tokens -> what is proposed by default
CASES = {
    "one token": ([7], []),
    "nothing repeats": ([1, 2, 3, 4], []),
    "as many as the match is long": ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4]),
    "more often wins": ([1, 2, 5, 8, 1, 2, 6, 9, 1, 2, 5, 7, 1, 2], [5, 7]),
    "of equals the latest": ([1, 2, 5, 8, 1, 2, 6, 9, 1, 2], [6, 9]),
    "up to the end": ([7, 7], [7]),
    "the longest match is surest": ([3, 1, 2, 5, 1, 2, 6, 1, 2, 6, 3, 1, 2], [5, 1, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    tokens, expected = CASES[case]
    assert reference(tokens, K, Suffix(K)) == expected
    assert propose(Suffix(K), [tokens] * B)[0] == expected


def test_a_run_ends_where_it_is_unlikely():
    """After 1 2 comes 5 three times, then four others once each."""
    tokens = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 5, 8, 1, 2]
    proposed = lambda **options: propose(Suffix(K, factor=2.0, **options), [tokens] * B)[0]
    assert proposed(min_prob=0.5) == [5]
    assert proposed(min_prob=0.3)[:2] == [5, 8]
    assert len(proposed(min_prob=0.3)) == 4
    assert len(proposed(min_prob=0.3, depth=4)) == 2


def test_the_engine_proposes_what_it_says(monkeypatch):
    """In every round; greedy and seeded text is plain decoding's."""
    rounds = recording(monkeypatch)
    served = new_engine("ngram", K, "loops", spec={"method": "suffix", "adaptive": False})
    sampling = (*params((24,) * 3), SamplingParams(temperature=0.9, seed=5, max_tokens=24))
    prompts = PROMPTS[: len(sampling)]
    assert texts(serve(served, prompts, sampling)) == plain(prompts, sampling, "loops")
    jax.effects_barrier()
    assert len(rounds) > 10
    for one in rounds:
        assert one.drafts == reference(one.tokens, K, Suffix(K))[: len(one.drafts)]
    assert max(len(one.drafts) for one in rounds) > 2


def test_a_seeded_row_proposes_the_same_in_any_program():
    """One of more drafts, which its neighbour wants, chooses among the runs that the row wants."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        row = rng.integers(0, 3, 30).tolist()
        few, many = (Suffix(k, most=32) for k in (2, 5))
        found = [propose(drafter, [row] * B, 2)[0] for drafter in (few, many)]
        assert found[0] == found[1], row

"""Prompt lookup against a few lines of Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache.pages import PagedKVCache
from jaxspec.drafters.base import Chunk
from jaxspec.drafters.ngram import NGram
from tests.drafters.histories import history

B, M, K = 8, 24, 4  # rows, room of a row's history, drafts


def reference(tokens: list[int], least: int, most: int, k: int) -> list[int]:
    """What followed the earliest occurrence of the longest repeated suffix, up to k tokens."""
    for n in range(most, least - 1, -1):
        for end in range(n, len(tokens)):  # tokens[end - n : end] ends before the suffix does
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + k]
    return []


def propose(drafter: NGram, histories: list[list[int]], wanted=K, live=True, rubbish: int = 0) -> list[list[int]]:
    """The proposals of B rows; `rubbish` fills what lies beyond each history."""
    proposal = run(drafter, history(histories, M, wanted, live, rubbish))
    assert proposal.probs is None
    assert proposal.tokens.shape == (B, K)
    return [t[:n].tolist() for t, n in zip(np.asarray(proposal.tokens), np.asarray(proposal.num_proposed), strict=True)]


def no_model(logits, i):
    raise AssertionError("prompt lookup has nothing to sample from")


run = jax.jit(lambda drafter, rows: drafter.propose({}, PagedKVCache(()), rows, no_model)[0], static_argnums=0)
one_row = st.lists(st.integers(0, 2), min_size=1, max_size=M - 1)


@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 4), (3, 3), (1, 1)])
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_the_longest_then_the_earliest_match(least, most, data):
    histories = data.draw(st.lists(one_row, min_size=B, max_size=B))
    wanted = data.draw(st.lists(st.integers(0, K), min_size=B, max_size=B))
    live = data.draw(st.lists(st.booleans(), min_size=B, max_size=B))
    rubbish = data.draw(st.integers(0, 2))
    proposed = propose(NGram(K, least, most), histories, wanted, live, rubbish)
    expected = [
        reference(h, least, most, w) if alive else [] for h, w, alive in zip(histories, wanted, live, strict=True)
    ]
    assert proposed == expected


# tokens -> what is proposed, for n-grams of 2 to 4
CASES = {
    "the prompt is one token": ([7], []),
    "too short to repeat": ([7, 7], []),
    "a run of itself": ([7, 7, 7], [7]),
    "nothing repeats": ([1, 2, 3, 4, 5, 6], []),
    "only a single token repeats": ([1, 2, 3, 1], []),
    "two tokens repeat": ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),
    "the longest wins": ([1, 2, 5, 0, 1, 2, 6, 8, 8, 0, 1, 2], [6, 8, 8, 0]),
    "the earliest of the longest wins": ([1, 2, 5, 9, 1, 2, 6, 9, 9, 1, 2], [6, 9, 9, 1]),
    "lookup_max caps the length": ([0, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4], [5, 9, 1, 2]),
    "fewer than K follow": ([1, 2, 3, 1, 2], [3, 1, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    tokens, expected = CASES[case]
    assert reference(tokens, 2, 4, K) == expected
    assert propose(NGram(K, 2, 4), [tokens] * B)[0] == expected


def test_rows_limits():
    repeats = [1, 2, 3, 4, 9, 1, 2]
    live = [True] * 6 + [False] * 2
    proposed = propose(NGram(K, 2, 4), [repeats] * B, wanted=[0, 1, 2, 3, 4, 4, 4, 0], live=live)
    assert proposed == [[], [3], [3, 4], [3, 4, 9], [3, 4, 9, 1], [3, 4, 9, 1], [], []]


def test_a_prompt_needs_no_prefill():
    cache = PagedKVCache(())
    chunk = Chunk(*[jnp.zeros((B, 4), jnp.int32)] * 4)
    assert NGram(K).prefill({}, cache, chunk) is cache.draft
    assert NGram(K).max_model_len is None

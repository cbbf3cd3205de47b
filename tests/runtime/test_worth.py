"""A launch whose rounds gain less than they are worth returns early; where it ends changes no token."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.decode.loop import PATIENCE
from jaxspec.engine.runner import fetch
from jaxspec.options.engine import MAX_ROUNDS
from tests.decode.test_round import K, start
from tests.support.lively_models import PROMPTS, engine, params, plain, texts
from tests.support.sizes import cases


def rounds_until_lost(gain: float, worth: float) -> int:
    """Rounds of a launch in which every round gains as much, while a row is at most PATIENCE rounds behind."""
    return next(n for n in range(MAX_ROUNDS + 1) if gain * n < worth * (n - PATIENCE) or n == MAX_ROUNDS)


def launches(method: str, worth: float, num_tokens: int = 24) -> tuple[list[int], list[list[int]]]:
    """-> (rounds of each launch, the texts)."""
    shared, prompts = engine(method, K), PROMPTS[1:4]
    requests = start(shared, prompts, params((num_tokens,) * 3))
    rounds = []
    while going := [r for r in requests if not r.finish_reason]:
        result = fetch(shared.runner.start(shared.launch(going, K, MAX_ROUNDS, worth)))
        rounds.append(int(result.num_rounds))
        shared.apply_result(going, result)
    return rounds, texts(requests)


@pytest.mark.parametrize(("method", "gain"), [("wrong", 1), ("itself", K + 1)])
@cases("excess", [0.0, 1e-3, 0.25, 1.0, 4.0, 1e6, np.inf], quick=[0.0, 0.25, 4.0, np.inf])
def test_a_launch_ends_where_it_has_lost(method, gain, excess):
    """worth = gain + excess, of rows that gain the same in every round; worth = gain is no loss."""
    num_tokens = 24 * gain if method == "wrong" else 40
    rounds, found = launches(method, gain + excess, num_tokens)
    needed, most = -(-num_tokens // gain), rounds_until_lost(gain, min(gain + excess, 1e9))
    assert rounds[0] == min(needed, most)
    assert sum(rounds) == needed
    assert found == plain(PROMPTS[1:4], tuple(params((num_tokens,) * 3)))
    if excess > 1e3:
        assert rounds[0] == PATIENCE + 1


@pytest.mark.parametrize("method", ["wrong", "noisy"])
def test_worth_nothing_never_ends_a_launch(method):
    rounds, _ = launches(method, 0.0)
    assert len(rounds) == 1


def test_tokens_do_not_depend_on_where_a_launch_ends():
    """Of a draft that is right now and then."""
    found = [launches("noisy", worth) for worth in (0.0, 2.0, 4.0, 5.0, 100.0)]
    assert len({tuple(rounds) for rounds, _ in found}) > 2
    assert all(text == plain(PROMPTS[1:4], tuple(params((24,) * 3))) for _, text in found)

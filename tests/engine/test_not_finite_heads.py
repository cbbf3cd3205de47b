"""Numbers that are none, in a head's weights or in the target's features: they cost drafts, and nobody else a token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.results import NOT_FINITE_MESSAGE
from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from tests.engine.test_not_finite import CONFIG, POISON, PROMPTS, poisoned, served
from tests.support import lively_heads, tiny_models
from tests.support.sizes import cases

K = 3
GOOD = (0, 2, 3)  # of PROMPTS
ASKED = [  # greedy, and each rule; the last has one id, so that its text is known
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=0.8, seed=3),
    SamplingParams(max_tokens=12, logit_bias={20: 100.0}),
]


def engine(kind: str, target: Model, damaged: bool) -> Engine:
    config = lively_heads.KINDS[kind][1](CONFIG)
    params = random_params(config, jnp.float32, make_placement(), seed=2)
    if damaged:
        floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        params = jax.tree.map(lambda x: x * jnp.nan if floats(x) else x, params)
    method, named = lively_heads.KINDS[kind][0], {} if lively_heads.KINDS[kind][0] == "mtp" else {"model": kind}
    speculative = {"method": method, "num_speculative_tokens": K, **named}
    return tiny_models.engine(target, speculative, Model(config, params), max_num_seqs=4, num_pages=24, page_size=8)


@pytest.mark.thorough
@cases("kind", lively_heads.KINDS, quick=["dflash"])
@cases("where", ["the head", "the target"], quick=["the head"])
def test_a_row_ends_alone(kind, where, monkeypatch):
    """Twice, in the same pages: what was left there by the first is no number, and nobody's."""
    target = poisoned() if where == "the target" else tiny_models.model(CONFIG)
    found, plain = engine(kind, target, where == "the head"), served("plain", "target" if where == "the target" else "")
    for one in (found, plain):
        monkeypatch.setattr(one, "grown_shape", lambda *requests: (4, 8))
    expected = tiny_models.run(plain, PROMPTS, ASKED)
    for _ in range(2):
        requests = tiny_models.run(found, PROMPTS, ASKED)
        assert [(r.output, r.error) for r in requests] == [(r.output, r.error) for r in expected]
    assert [expected[i].finish_reason for i in GOOD] == ["length"] * len(GOOD)
    assert (expected[1].error == NOT_FINITE_MESSAGE) == (where == "the target")
    assert POISON in PROMPTS[1]
    assert (requests[0].metrics.num_draft_tokens > 0) == (where == "the target"), "no draft without a number"

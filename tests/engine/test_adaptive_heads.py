"""How many drafts, where a head makes them: as acceptance has it, whatever it is, and the text is plain decoding's."""

from __future__ import annotations

import pytest

from jaxspec.engine.adaptive import Controller
from jaxspec.engine.engine import Engine
from jaxspec.options.sampling_params import SamplingParams
from tests.support import lively_heads
from tests.support.lively_models import new_engine, repeating, serve, texts
from tests.support.sizes import cases

K = 4
PROMPTS = (repeating(7, 3, 1), repeating(16, 5, 2), (9,))
ROOM = {"max_model_len": 256, "num_pages": 60, "enable_prefix_caching": False}
# What is added to logits is added to the draft's, too: by the first both always say one id, by the second hardly ever.
ALIKE, APART = {7: 100.0}, {7: -100.0}


def one_shape(engine: Engine) -> Engine:
    engine.grown_shape = lambda *requests: (4, 16)  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module")
def plain() -> Engine:
    return one_shape(new_engine(**ROOM))


@cases("kind", lively_heads.KINDS, rest=["p-eagle"])
def test_acceptance_decides(kind, plain, monkeypatch):
    """A draft costs three tenths of a round. All are taken while they are right, none where they are not."""
    found = one_shape(lively_heads.engine(kind, K, spec={"adaptive": True}, **ROOM))
    assert tuple(found.runner.drafters) == (0, K // 2, K)
    launch, observe = found.launch, Controller.observe
    for bias, tokens, expected in ((ALIKE, 150, K), (APART, 60, 0)):
        used = []
        found.controller = Controller((0, K // 2, K), draft_cost=0.5)

        def seen(requests, k, *rest, used=used):
            used.append(k)
            return launch(requests, k, *rest)

        def measured(self, k_of, k, seconds, rounds, **rest):
            observe(self, k_of, k, (1 + 0.3 * k) * rounds, rounds, **rest)

        monkeypatch.setattr(found, "launch", seen)
        monkeypatch.setattr(Controller, "observe", measured)
        sampling = [SamplingParams(temperature=0.0, max_tokens=tokens, logit_bias=bias)] * len(PROMPTS)
        assert texts(serve(found, PROMPTS, sampling, rounds=2)) == texts(serve(plain, PROMPTS, sampling, rounds=32))
        assert set(used[12:]) == {expected}, used  # six to measure, six to see what K / 2 brings

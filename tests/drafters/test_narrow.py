"""On CPU products read bfloat16 where that holds the same numbers as float32: every drafter then says what it says."""

from __future__ import annotations

import pytest

from jaxspec.bench.models import as_published
from jaxspec.models import storage
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from tests.support import lively_heads, lively_models, tiny_models
from tests.support.sizes import cases

K = 4


def published(m: Model) -> Model:
    return Model(m.config, {name: as_published(x) for name, x in m.params.items()})


@pytest.mark.thorough
@cases("kind", lively_heads.KINDS, quick=["eagle3"])
def test_every_drafter_says_the_same(kind, monkeypatch):
    chosen = {"method": lively_heads.KINDS[kind][0], "num_speculative_tokens": K}
    chosen |= {} if kind == "mtp" else {"model": kind}
    target, draft = map(published, (lively_models.target(), lively_heads.head(kind)))
    params = [SamplingParams(temperature=t, max_tokens=24, seed=5) for t in (0.0, 0.0, 0.8, 0.8)]
    seen = []
    for narrow in (True, False):
        if not narrow:
            monkeypatch.setattr(storage, "same_in_bfloat16", lambda x: False)
        engine = tiny_models.engine(target, chosen, draft, **lively_models.OPTIONS)
        assert {storage.narrow(p) for p in engine.runner.params.values()} == {narrow}
        requests = tiny_models.run(engine, lively_models.PROMPTS[:4], params)
        seen.append([(r.output, r.metrics) for r in requests])
    assert seen[0] == seen[1]
    assert sum(metrics.num_draft_tokens for _, metrics in seen[0]) > 0

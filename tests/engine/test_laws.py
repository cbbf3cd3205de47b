"""The engine draws from the law of targets whose layers are not all alike, beside drafts with a distribution."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from tests.support import exact, lively_heads, tiny_models
from tests.support.launches import paged
from tests.support.lively_models import lively, noisy

pytestmark = pytest.mark.thorough

V, LENGTH, K, SAMPLES, ROWS = 8, 3, 2, 10_000, 250
PROMPT = tuple(np.random.default_rng(1).integers(0, V, 20).tolist())  # longer than the windows


def assistant(target: Model) -> Model:
    """Its clusters give half of the ids a probability."""
    config = lively_heads.assistant(target.config)
    return Model(config, random_params(config, jnp.float32, make_placement(), seed=1))


DRAFTS = {
    "gemma4": ("gemma4_assistant", assistant),
    "olmo3": ("draft_model", lambda target: noisy(target, 0.5)),
}


@pytest.mark.parametrize(
    ("family", "rule"), [("gemma4", "standard"), ("gemma4", "block"), ("gemma4", "coupled"), ("olmo3", "standard")]
)
def test_samples_have_the_targets_law(family, rule):
    config = dataclasses.replace(tiny_models.FAMILIES[family], vocab_size=V)
    target = lively(tiny_models.model(config, 3))
    method, draft = DRAFTS[family]
    spec = {"method": method, "model": "x", "num_speculative_tokens": K, "rejection_sample_method": rule}
    sizes = {"max_model_len": 64, "max_num_seqs": ROWS, "num_pages": 4 * ROWS, "prefill_chunk": 1024}
    engine = tiny_models.engine(target, spec, draft(target), **sizes)
    how = SamplingParams(temperature=1.5, max_tokens=LENGTH, ignore_eos=True)
    requests = [engine.add(PROMPT, how) for _ in range(SAMPLES)]
    while engine.busy:
        engine.step(4)
    law = exact.joint(
        [
            exact.distribution(z, 1.5, 0, 1.0, 0.0)
            for z in exact.next_logits(paged(target, 4 * V ** (LENGTH - 1)), target.params, PROMPT, LENGTH)
        ]
    )
    found = exact.histogram(np.array([request.output for request in requests]), V)
    assert found.sum() == SAMPLES
    assert exact.chi_square(found, law) > 1e-4
    assert 0.1 < engine.metrics.draft_acceptance_rate < 0.95

"""The engine draws from the law of targets whose layers are not all alike, beside drafts with a distribution."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from tests.support import exact, lively_heads, tiny_models
from tests.support.launches import paged
from tests.support.lively_models import lively, noisy
from tests.support.sizes import cases

V, LENGTH, K, SAMPLES, ROWS = 8, 3, 2, 10_000, 250
PROMPT = tuple(np.random.default_rng(1).integers(0, V, 20).tolist())  # longer than the windows


# Family -> the head beside it. The clusters of Gemma 4's assistant give half of the ids a probability.
HEADS = {"gemma4": "gemma4_assistant", "muse_glimmer": "dflash"}
# Families whose draft model is the target with noise.
NOISY = ("olmo3", "granite", "phi3", "smollm3", "olmo2", "ministral3")
CASES = [(family, rule) for family in HEADS for rule in ("standard", "block", "coupled")]
CASES += [(family, "standard") for family in NOISY]
REST = [("gemma4", "standard"), ("muse_glimmer", "block"), ("olmo3", "standard")]


def draft(family: str, target: Model) -> Model:
    """The target with noise, or a random head."""
    if family in NOISY:
        return noisy(target, 0.5)
    config = lively_heads.KINDS[HEADS[family]][1](target.config)
    return Model(config, random_params(config, jnp.float32, make_placement(), seed=1))


@cases(("family", "rule"), CASES, rest=REST)
def test_samples_have_the_targets_law(family, rule):
    config = dataclasses.replace(tiny_models.FAMILIES[family], vocab_size=V)
    target = lively(tiny_models.model(config, 3))
    method = HEADS.get(family, "draft_model")
    spec = {"method": method, "model": "x", "num_speculative_tokens": K, "rejection_sample_method": rule}
    sizes = {"max_model_len": 64, "max_num_seqs": ROWS, "num_pages": 4 * ROWS, "prefill_chunk": 1024}
    engine = tiny_models.engine(target, spec, draft(family, target), **sizes)
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

"""A pass without a cache computes what passes over pages do."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.models.decoder import whole
from pallas_kernels.device import AMPERE, CPU, Device, here
from tests.models import forward
from tests.support import lively_models, tiny_models
from tests.support.sizes import cases


@cases("family", tiny_models.FAMILIES, quick=["llama", "gemma3"])
def test_equals_the_paged_pass(family):
    model, backend = lively_models.target(family), Backend(here())
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 40)).astype(np.int32)

    def logits(params):
        decoder, hidden = whole(model.config, params, tokens, backend)
        return decoder.logits(hidden, backend)

    dense = np.asarray(jax.jit(logits)(model.params))
    np.testing.assert_allclose(dense, forward.run(model.config, model.params, tokens, (17, 23)), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("implementation", [None, "reference", "pallas"])
def test_every_choice_of_kernels_takes_many_rows(implementation):
    model, backend = tiny_models.model(tiny_models.BASE), Backend(Device("gpu", AMPERE), None, implementation)
    hidden = lambda params: whole(model.config, params, np.zeros((2, 40), np.int32), backend)[1]
    assert jax.eval_shape(hidden, model.params).shape == (2, 40, model.config.width)


def test_a_soft_cap_is_refused():
    model = tiny_models.model(dataclasses.replace(tiny_models.BASE, soft_cap=30.0))
    with pytest.raises(NotImplementedError, match=r"soft cap \(30"):
        whole(model.config, model.params, np.zeros((1, 4), np.int32), Backend(CPU))

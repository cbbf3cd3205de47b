"""Drafts of a pass that says something of all places at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.chain import at_once
from jaxspec.models.head import Head
from pallas_kernels.plain import argmax

B, K, E, V = 2, 5, 8, 16


@pytest.mark.parametrize("sampled", [False, True])
def test_each_place_is_computed_once_and_copied_without_a_loop(sampled, monkeypatch):
    """What is likeliest is only looked up, and a loop would cost more than that; a distribution is work, compiled
    once."""
    asked, table = [], jnp.asarray(np.random.default_rng(0).standard_normal((E, V)), jnp.float32)
    monkeypatch.setattr(Head, "logits", lambda self, x, backend: asked.append(0) or x @ table)
    monkeypatch.setattr(Head, "argmax_token", lambda self, x, backend, size: argmax(self.logits(x, backend)))
    monkeypatch.setattr(Head, "vocabulary", None)
    hidden = jnp.asarray(np.random.default_rng(1).standard_normal((B, K, E)), jnp.float32)

    def choose(place, x, drafts, i):
        if not sampled:
            return place.argmax_token(x, None, V), None
        logits = place.logits(x, None)
        return argmax(logits), jax.nn.softmax(logits)

    program = jax.jit(lambda hidden: at_once(Head(), hidden, choose)).lower(hidden).as_text()
    assert len(asked) == 1
    assert ("stablehlo.while" in program) == sampled
    drafts, probs = at_once(Head(), hidden, choose)
    np.testing.assert_array_equal(drafts, argmax(hidden @ table))
    assert (probs is None) != sampled

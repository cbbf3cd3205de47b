"""A hundred random requests, arriving and aborted at random, on a pool that is far too small. See tests/soak.py."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.decode.state import Variant
from tests.soak import METHODS, Soak, complaints, draw, reference_engine, tiny_engine

EVERYTHING = Variant(frozenset({"standard", "coupled"}), filters=True, logprobs=5, processors=True)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_random_requests_get_what_they_would_get_alone(method):
    rng = np.random.default_rng(METHODS.index(method))
    cases = draw(rng, 34)
    soak = Soak(tiny_engine(method), rng)
    soak.engine.variants.choose = lambda program, exact: EVERYTHING  # compiling takes longest
    soak.serve(cases)
    soak.check_idle()
    reference = reference_engine()
    reference.variants.choose = soak.engine.variants.choose
    assert complaints(cases, soak.requests, reference) == []
    assert soak.engine.scheduler.num_preemptions > 0
    assert soak.engine.scheduler.allocator.num_evicted > 0
    assert min(soak.launches[k] for k in (0, 2, 4)) > 0

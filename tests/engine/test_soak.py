"""Random requests for each method, arriving and aborted at random, on a pool that is far too small: see
tests/support/soak.py.

`make test` takes one of the methods.
"""

from __future__ import annotations

import zlib

import numpy as np

from jaxspec.decode.state import Variant
from jaxspec.drafters.methods import LOOKUP
from jaxspec.verify import rules
from tests.support.sizes import cases
from tests.support.soak import METHODS, Soak, complaints, draw, reference_engine, tiny_engine, windowed_engine

RULES = frozenset({rules.UNSEEDED, rules.SEEDED})
EVERYTHING = Variant(RULES, filters=True, logprobs=5, processors=True, grammars=True)
SOME = [name for name in METHODS if not name.startswith(LOOKUP) or name in ("ngram+draft_model", "ngram+eagle3")]


# Layers that differ and share their keys, with a draft that reads these; a rotary embedding of a part of each head;
# layers without rotary embedding and gates of attention, with a draft whose windows reach to both sides.
OTHERS = [("gemma4_assistant", "gemma4"), ("draft_model", "phi3"), ("dflash", "muse_glimmer")]
ALIKE = [("draft_model", family) for family in ("granite", "smollm3", "olmo2", "olmo3", "ministral3")]
CASES = [*((name, "llama") for name in SOME), *ALIKE, *OTHERS]


@cases(("method", "family"), CASES, quick=[("draft_model", "llama")])
def test_random_requests_get_what_they_would_get_alone(method, family):
    rng = np.random.default_rng(zlib.crc32(method.encode()))  # the same when other methods come
    cases = draw(rng, 24)
    soak = Soak(tiny_engine(method, family), rng)
    check(soak, cases, lambda: draw(rng, 24), reference_engine(family))


@cases(
    ("method", "family"),
    [("draft_model", "olmo3"), ("gemma4_assistant", "gemma4"), ("ngram+eagle3", "mistral"), ("dflash", "muse_glimmer")],
    quick=[],
    rest=[("draft_model", "olmo3")],
)
def test_random_requests_on_a_small_pool_of_layers_with_a_window(method, family):
    rng = np.random.default_rng(zlib.crc32(method.encode()))
    more = lambda: draw(rng, 34, longest=96)
    soak = Soak(windowed_engine(method, family), rng)
    check(soak, more(), more, reference_engine(family, max_model_len=128, num_pages=280))


def check(soak, cases, more_cases, reference):
    """Serve these requests, and more until some were preempted. Compare each with its output alone."""
    soak.engine.catalogue.variants.choose = lambda program, exact: EVERYTHING  # compiling takes longest
    soak.serve(cases)
    for _ in range(3):  # whether somebody is put back depends on what the controller chooses, too
        if not soak.engine.scheduler.num_preemptions:
            cases += (more := more_cases())
            soak.serve(more)
    soak.check_idle()
    reference.catalogue.variants.choose = soak.engine.catalogue.variants.choose
    assert complaints(cases, soak.requests, reference) == []
    assert soak.engine.scheduler.num_preemptions > 0
    assert soak.engine.scheduler.allocator.num_evicted > 0
    assert min(soak.launches[k] for k in (0, 2, 4)) > 0
    assert 0 < soak.passes["queued"] <= soak.passes["waited for"]

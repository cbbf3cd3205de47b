"""Keys and values in 8 bits: speculative decoding gives the tokens of plain decoding with the same pages, in float32.

A request may be alone, one of a batch, preempted, or begin in pages that another request wrote. Its keys and values are
written by prefill, one at a time, in verification, or moved to their place in a tree.
"""

from __future__ import annotations

import pytest

from jaxspec.options.sampling_params import SamplingParams
from tests.support.lively_models import new_engine, repeating, serve, texts
from tests.support.sizes import cases

K, PAGE = 3, 4
LONG = repeating(24, 7, 1)
PROMPTS = (LONG, (*LONG[:18], 60, 61, 62), repeating(5, 3, 2), (9, 8))
GREEDY, MIXED = (0.0,) * 4, (0.0, 0.8, 0.0, 0.8)
SIZES = {"max_num_seqs": 4, "page_size": PAGE, "num_pages": 24, "prefill_chunk": 32}
TREE = {"tree_width": 2, "tree_depth": 3, "tree_nodes": 7, "num_speculative_tokens": 6}
CASES = [
    (dtype, family, shape, 1, MIXED)
    for dtype in ("int8", "fp8", "fp8_e5m2")
    for family in ("llama", "gemma3")
    for shape in ("tree", "chain")
]
CASES += [("int8", "llama", "chain", 2, MIXED), ("fp8", "llama", "tree", 2, MIXED)]
CASES += [("int8", family, "tree", 1, MIXED) for family in ("gemma4", "muse_glimmer")]
QUICK = [("int8", "llama", "chain", 1, GREEDY)]
REST = [("int8", "llama", "tree", 1, MIXED), ("fp8", "gemma3", "tree", 1, MIXED), ("int8", "llama", "chain", 2, MIXED)]


def sampling(temperatures=GREEDY, **options) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, seed=i, temperature=t, **options) for i, t in enumerate(temperatures)]


@cases(("dtype", "family", "shape", "devices", "temperatures"), QUICK + CASES, quick=QUICK, rest=REST)
def test_equals_plain_decoding_with_the_same_pages(dtype, family, shape, devices, temperatures):
    spec = {"kv_cache_dtype": dtype} | (TREE if shape == "tree" else {})
    sizes = SIZES | {"tensor_parallel_size": devices}
    engine = new_engine("noisy", K, family, spec=spec, kv_cache_dtype=dtype, **sizes)
    engine.grown_shape = lambda *requests: (4, 16)  # one program for all numbers of rows
    wishes, off = sampling(temperatures), sampling(temperatures, num_speculative_tokens=0)
    pages, expected = engine.scheduler.allocator, []
    for prompt, wanted in zip(PROMPTS, off, strict=True):
        pages.reset()
        expected += texts(serve(engine, [prompt], [wanted]))
    assert engine.scheduler.num_preemptions == 0
    pages.reset()
    together = serve(engine, PROMPTS, wishes, rounds=2)
    assert engine.scheduler.num_preemptions > 0, "the pool is too small for all"
    assert texts(together) == expected
    assert sum(r.metrics.num_accepted_tokens for r in together) > 10
    pages.reset()
    serve(engine, [LONG], wishes[:1])
    assert len(pages.page_of) > len(PROMPTS[1][:18]) // PAGE
    assert texts(serve(engine, PROMPTS[1:2], wishes[1:2])) == expected[1:2], "its beginning is known"
    cache = engine.runner.cache
    assert {layer.pages.dtype.itemsize for layer in (*cache.target, *cache.draft)} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("of_draft", [False, True])
def test_target_and_draft_have_forms_of_their_own(of_draft):
    spec, own = ({"kv_cache_dtype": "int8"}, {}) if of_draft else ({}, {"kv_cache_dtype": "int8"})
    engine = new_engine("noisy", K, spec=spec, **own, **SIZES)
    assert [layer.pages.dtype.itemsize for layer in engine.runner.cache.target] == [4 if of_draft else 1] * 2
    assert [layer.pages.dtype.itemsize for layer in engine.runner.cache.draft] == [1 if of_draft else 4] * 2
    off = sampling(num_speculative_tokens=0)
    assert texts(serve(engine, PROMPTS, sampling())) == texts(serve(engine, PROMPTS, off))

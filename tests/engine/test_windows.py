"""A pool of its own for layers with a window: every token is that of plain decoding with pages of the whole context."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import Variant
from jaxspec.engine import batch
from jaxspec.engine.engine import Engine
from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime import wire
from jaxspec.runtime.packing import pack
from jaxspec.runtime.plans import Plan
from jaxspec.verify import rules
from tests.engine.test_pages import prefilled_lengths
from tests.support import lively_heads, tiny_models
from tests.support.lively_models import OPTIONS, new_engine, params, repeating, serve, target, texts
from tests.support.sizes import cases

K, PAGE, WINDOW = 3, 4, 12
FAMILY = "olmo3"  # whose two layers compile soonest
SIZES = {"max_model_len": 128, "page_size": PAGE, "num_pages": 96, "max_num_seqs": 3, "prefill_chunk": 16}
NEEDED = 3 * (-(-(WINDOW + 1 + 2 * (K + 1)) // PAGE) + 2) + 16 // PAGE
LONG = repeating(70, 11, 1)
VARIATION = (*LONG[:58], 60, 61, 62)
PROMPTS = (LONG, VARIATION, repeating(37, 5, 2), (9,))
LENGTHS = (50, 40, 60, 90)
GREEDY = tuple(params(LENGTHS))
MIXED = tuple(
    SamplingParams(max_tokens=n, seed=i, temperature=t)
    for i, (n, t) in enumerate(zip(LENGTHS, (0.0, 0.9) * 2, strict=True))
)
EITHER = Variant(frozenset({rules.UNSEEDED, rules.SEEDED}))  # one program for greedy and sampled text
TREE = {"tree_width": 2, "tree_depth": 3, "tree_nodes": 7}


def windowed(method: str = "noisy", family: str = FAMILY, k: int = K, **options) -> Engine:
    """rounds_per_launch makes the pool small."""
    make = lively_heads.engine if method in lively_heads.KINDS else new_engine
    engine = make(method, k, family, **SIZES | {"rounds_per_launch": 2} | options)
    engine.grown_shape = lambda *requests: (4, 33)
    engine.catalogue.variants.choose = lambda program, exact: EITHER
    return engine


@functools.cache
def shared() -> Engine:
    return windowed()


def own() -> Engine:
    """One for all tests of this file, with nothing known."""
    engine = shared()
    engine.scheduler.reset(())
    return engine


@functools.cache
def whole(family: str = FAMILY, **options) -> Engine:
    """Plain decoding. So many rows would need more pages of layers with a window than there are."""
    engine = new_engine("plain", 0, family, **SIZES | {"num_pages": 200, "max_num_seqs": 16} | options)
    assert engine.layout.num_window_pages is None
    engine.grown_shape = lambda *requests: (16, 33)
    engine.catalogue.variants.choose = lambda program, exact: EITHER
    return engine


def plain(prompts=PROMPTS, sampling=GREEDY, family: str = FAMILY, **options) -> list[list[int]]:
    engine = whole(family, **options)
    engine.scheduler.reset(())
    return texts(serve(engine, prompts, sampling))


def idle(engine: Engine) -> None:
    """No row holds anything of the pool."""
    pool = engine.scheduler.windows
    assert pool.num_free == pool.num_pages
    assert pool.users == {}


ALIKE = [("noisy", "gemma4", K), ("plain", "mistral", 0), ("ngram", "gemma3", K), ("eagle3", "muse_glimmer", K)]


@cases(("method", "family", "k"), [("noisy", FAMILY, K), *ALIKE], quick=[("noisy", FAMILY, K)], rest=ALIKE[:1])
@cases("sampling", [GREEDY, MIXED], quick=[MIXED], ids=["greedy", "mixed"])
def test_equals_plain_decoding(method, family, k, sampling):
    """Texts of many windows, in more chunks than one, whose beginnings are shared."""
    engine = own() if family == FAMILY else windowed(method, family, k)
    found = serve(engine, PROMPTS, sampling)
    assert texts(found) == plain(sampling=sampling, family=family)
    idle(engine)
    if method == "noisy":
        assert sum(r.metrics.num_accepted_tokens for r in found) > 20


@pytest.mark.thorough
@cases("family", ["gemma4", "mistral"], rest=["gemma4"])
@cases("method", ["noisy", "eagle3"], rest=["noisy"])
def test_trees_equal_plain_decoding(method, family):
    """The path that is accepted moves to its place in both pools."""
    engine = windowed(method, family, 6, spec=TREE)
    found = serve(engine, PROMPTS, GREEDY)
    assert texts(found) == plain(family=family)
    if method == "noisy":
        assert sum(r.metrics.num_accepted_tokens for r in found) > 20


def test_the_pools_are_as_large_as_they_say():
    engine = own()
    layout = engine.layout
    assert layout.window_pool == (NEEDED, WINDOW)
    window, full = (layer.pages for layer in engine.runner.cache.target)
    assert (window.shape[0], full.shape[0]) == (NEEDED, 96)
    assert {layer.pages.shape[0] for layer in engine.runner.cache.draft} == {96}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.cache.target))
    assert size == layout.pool_bytes(1, "cpu") == window.nbytes + full.nbytes


@pytest.mark.parametrize("family", ["llama", FAMILY])
def test_programs_without_such_a_pool_take_no_more_arrays(family):
    """Nor do those of a model with windows if its pool would not be the smaller one."""
    layout = dataclasses.replace(own().layout, num_window_pages=None) if family == FAMILY else whole("llama").layout
    shape = batch.ChunkShape(1, 16)
    inputs = batch.launch_input([], K, Variant(), layout, (2, 8), num_rounds=1, vocab_size=64)
    assert inputs.window_table is None
    assert batch.chunk_input([], layout, shape, row_pages=8).window_table is None
    assert len(batch.copied_pages([(1, 2)], layout)) == 2


def test_plans_carry_both_tables_to_other_hosts():
    engine = own()
    request = engine.add(LONG, params(9)[0])
    for _ in range(4):
        engine.step()
    chunk = batch.chunk_input([batch.Piece(request, 0, 16)], engine.layout, engine.prefilling.shape, row_pages=33)
    plans = engine.launch([request], K, 2), Plan("prefill", (chunk,))
    plans += (Plan("copy_pages", batch.copied_pages([(1, 2, 3, 4)], engine.layout)),)
    for plan in plans:
        sent = wire.from_bytes(wire.to_bytes(plan, pack(plan.arrays)))
        assert sent.program == plan.program
        jax.tree.map(np.testing.assert_array_equal, sent.arrays.unpack(), plan.arrays)
    assert plans[0].arrays[0].window_table[0, : len(request.window_pages)].tolist() == request.window_pages
    assert set(request.window_pages) > {engine.layout.num_window_pages}
    engine.abort(request)
    idle(engine)


def test_a_beginning_is_reused_while_its_window_is_kept(monkeypatch):
    """Whole, in part, or not at all; and what was computed again can be reused again."""
    engine = own()
    pool, lengths = engine.scheduler.windows, prefilled_lengths(engine, monkeypatch)
    expected = plain((LONG, VARIATION), GREEDY[:2])

    def lose(count: int) -> None:
        """Other pages need the window pages of this prompt's pages from the given one on."""
        pages = engine.scheduler.allocator.lookup(engine.scheduler.digests(request, len(LONG) // PAGE))
        for page in pages[count:]:
            if page in pool.idle:
                pool.idle.pop(page)
                pool.free.append(pool.of.pop(page))

    seen = []
    for prompt, wanted, output in ((LONG, GREEDY[0], expected[0]), (VARIATION, GREEDY[1], expected[1])) * 2:
        lengths.clear()
        (request,) = serve(engine, [prompt], [wanted])
        assert request.output == output
        seen.append(sum(lengths))
    assert seen == [69, 60 - 56, 69 - 64, 60 - 56]
    seen.clear()
    for kept in (17, 16, 0):
        request = serve(engine, [LONG], params(1))[0]
        lose(kept)
        lengths.clear()
        assert texts(serve(engine, [LONG], GREEDY[:1])) == expected[:1]
        seen.append(sum(lengths))
        lengths.clear()
        assert texts(serve(engine, [LONG], GREEDY[:1])) == expected[:1]
        seen.append(sum(lengths))
    assert seen == [69 - 68, 1, 69 - 64, 1, 69, 1]
    idle(engine)


def test_preemption_and_abort():
    """Few pages for all, so that rows lose them and compute them again; one is aborted midway."""
    engine = own()
    held = engine.scheduler.allocator.allocate(96 - 40)
    before = engine.scheduler.num_preemptions
    requests = [engine.add(p, s) for p, s in zip(PROMPTS, GREEDY, strict=True)]
    for _ in range(12):
        engine.step()
    requests[0].finish_reason or engine.abort(requests[0])
    while engine.busy:
        engine.step()
    assert engine.scheduler.num_preemptions > before
    expected = plain()
    assert texts(requests)[1:] == expected[1:]
    assert requests[0].output == expected[0][: len(requests[0].output)]
    engine.scheduler.allocator.release(held)
    idle(engine)


def test_samples_of_a_prompt():
    """They share its pages, and copy the last one in both pools."""
    engine = own()
    wanted = SamplingParams(max_tokens=30, temperature=0.9, seed=5, n=3)
    first = serve(engine, [LONG[:42]], [wanted])[0]
    seeds = [s.seed for s in first.samples]
    alone = [SamplingParams(max_tokens=30, temperature=0.9, seed=seed) for seed in seeds]
    assert texts(first.samples) == plain([LONG[:42]] * 3, alone)
    idle(engine)


@pytest.mark.thorough
def test_log_probabilities_of_a_prompt():
    engine = own()
    wanted = [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)]
    ours, theirs = (serve(e, [LONG], wanted)[0].prompt_logprobs for e in (engine, whole()))
    assert len(ours) == len(theirs) == 69
    assert [x.top_ids for x in ours] == [x.top_ids for x in theirs]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.thorough
@cases("dtype", ["int8", "fp8"], rest=["int8"])
def test_keys_in_8_bits(dtype):
    engine = windowed(spec={"kv_cache_dtype": dtype}, kv_cache_dtype=dtype)
    assert texts(serve(engine, PROMPTS, GREEDY)) == plain(kv_cache_dtype=dtype)


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_two_devices():
    engine = windowed(tensor_parallel_size=2)
    assert texts(serve(engine, PROMPTS, GREEDY)) == plain(tensor_parallel_size=2)


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_spare_rows_take_places():
    engine = windowed(max_num_seqs=8, num_pages=200)
    assert engine.catalogue.spare[8] == 1
    engine.grown_shape = lambda *requests: (8, 33)
    prompts, sampling = PROMPTS * 6, GREEDY * 6
    assert texts(serve(engine, prompts, sampling)) == plain() * 6


def assistant_of_the_window(family: str = "gemma4") -> Model:
    """An assistant of one layer, which reads the target's last layer with a window."""
    t = target(family).config
    config = lively_heads.assistant(t)
    layer = dataclasses.replace(t.layers[2], mixer="queries", num_kv_heads=t.num_heads, shares=None, window=WINDOW + 1)
    config = dataclasses.replace(config, per_layer=(layer,), windows=(WINDOW + 1,), reads=(0,))
    return Model(config, random_params(config, jnp.float32, make_placement(), 5))


@pytest.mark.thorough
def test_an_assistant_sees_the_same_keys():
    """It reads one position further back than the target. All its drafts are accepted, so that they are the text."""
    always = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0,) * K}
    spec = {"model": "x", "num_speculative_tokens": K} | always
    found = []
    for options in ({"rounds_per_launch": 2}, {"max_num_seqs": 16, "num_pages": 200}):
        engine = tiny_models.engine(target("gemma4"), spec, assistant_of_the_window(), **OPTIONS | SIZES | options)
        engine.grown_shape = lambda *requests: (4, 33)
        assert (engine.layout.num_window_pages is None) == ("max_num_seqs" in options)
        found.append(serve(engine, PROMPTS, GREEDY, rounds=2))
        assert all(r.metrics.num_accepted_tokens >= K * len(r.output) // (K + 1) - K for r in found[-1])
    assert texts(found[0]) == texts(found[1])

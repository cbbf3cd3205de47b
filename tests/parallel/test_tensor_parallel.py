"""Two devices give the tokens of one, and really hold half of everything that is large."""

from __future__ import annotations

import jax
import pytest

from jaxspec import LLM
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from tests.support import grammars, lively_heads, tiny_models
from tests.support.lively_models import (
    FAMILY,
    OPTIONS,
    PROMPTS,
    VOCAB,
    engine,
    first_layer,
    lively,
    new_engine,
    params,
    plain,
    serve,
    target,
    texts,
)
from tests.support.model_folders import write_model
from tests.support.sizes import cases

K = 3
SEEDED = tuple(SamplingParams(max_tokens=20, seed=i, temperature=0.4, top_k=20) for i in range(5))
GREEDY = tuple(params((20,) * 5))
BOTH = GREEDY[:2] + SEEDED[2:]  # in one batch: programs for each alone would take longer
# Parameter -> how one of two shards differs from the whole: the axis that is halved, None where it is replicated.
HALVED = {"embed": 0, "head": 1, "qkv": 1, "out": 0, "gate_up": 1, "down": 0}


@cases("method", ["plain", "first_layer", "reduced", "ngram"], quick=["ngram"])
def test_two_devices_give_the_same_tokens(method):
    family = FAMILY.get(method, "llama")
    two = new_engine(method, K * (method != "plain"), family, tensor_parallel_size=2)
    one = engine(method, K * (method != "plain"), family)
    mine, theirs = serve(two, PROMPTS, BOTH, rounds=4), serve(one, PROMPTS, BOTH)
    assert texts(mine) == texts(theirs) == plain(PROMPTS, BOTH, family)
    counters = [r.metrics.as_dict() for r in theirs]
    assert [r.metrics.as_dict() for r in mine] == counters
    assert method == "plain" or sum(c["num_accepted_tokens"] for c in counters) > 0


@pytest.mark.thorough
def test_two_devices_obey_a_grammar():
    """Each has all tables, and masks its part of the logits."""
    two = new_engine("first_layer", K, tensor_parallel_size=2)
    automata = [grammars.random(VOCAB, 9, seed, legal=0.4) for seed in range(5)]
    for sampling in (GREEDY, SEEDED):
        mine = serve(two, PROMPTS, sampling, rounds=4, automata=automata)
        assert texts(mine) == texts(serve(engine(), PROMPTS, sampling, automata=automata))
        assert all(grammars.obeys(a, r.output) for a, r in zip(automata, mine, strict=True))
    assert two.runner.grammars.is_fully_replicated


@cases(
    ("kind", "own"),
    [*((kind, 2) for kind in lively_heads.KINDS), ("eagle3", 1), ("dflash", 1), ("mtp", 1), ("pard", 1)],
    quick=[("eagle3", 1)],
)
def test_drafts_of_two_devices_are_those_of_one(kind, own):
    """Accepted by lot, so that they are the text. Each device has its part of the features of a position."""
    lots = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.9, 0.8, 0.7)}
    one = lively_heads.engine(kind, K, spec=lots)
    two = lively_heads.engine(kind, K, spec=lots, tensor_parallel_size=2, draft_tensor_parallel_size=own)
    sampling = [SamplingParams(max_tokens=20, seed=i, temperature=0.0) for i in range(5)]
    assert texts(serve(two, PROMPTS, sampling, rounds=4)) == texts(serve(one, PROMPTS, sampling, rounds=4))
    assert two.metrics.num_accepted_tokens > 20
    for leaf in two.runner.cache.features:
        assert leaf.sharding.spec == two.runner.placement.draft.of_features
        assert {s.data.shape[2] for s in leaf.addressable_shards} == {leaf.shape[2] // own}


@pytest.mark.parametrize("family", ["llama", "loops", "qwen2"])
def test_parameters_are_halved(family):
    for name, array in target(family, 2).params.items():
        axis = HALVED.get(name.rsplit(".", 1)[-1])
        if name.endswith("qkv_bias"):
            axis = 0
        expected = tuple(n // 2 if i == axis else n for i, n in enumerate(array.shape))
        shards = array.addressable_shards
        assert [s.data.shape for s in shards] == [expected] * 2, name
        assert len({s.device for s in shards}) == 2


def test_caches_are_halved_and_stay_so():
    """Before and after a launch: each device has half of the heads of both models."""
    two = new_engine("first_layer", K, tensor_parallel_size=2)

    def check():
        for leaf in jax.tree.leaves(two.runner.cache):
            assert not leaf.sharding.is_fully_replicated
            pages, page, heads, size = leaf.shape
            assert [s.data.shape for s in leaf.addressable_shards] == [(pages, page, heads // 2, size)] * 2

    check()
    serve(two, PROMPTS[:2], GREEDY[:2])
    check()


def eight_heads(config):
    """The model with eight heads of keys and values in each layer, and MLPs of eight blocks."""
    own = [
        tiny_models.dataclasses.replace(
            layer, num_heads=8, num_kv_heads=8, mlp_width=64 * (1 + (layer.shares is not None))
        )
        for layer in config.per_layer
    ]
    return tiny_models.dataclasses.replace(config, num_heads=8, num_kv_heads=8, mlp_width=64, per_layer=tuple(own))


@pytest.mark.thorough
@pytest.mark.skipif(jax.device_count() < 8, reason="wants 8 devices: --xla_force_host_platform_device_count")
@pytest.mark.parametrize("family", ["gemma4", "phi3"])
def test_eight_devices_give_the_same_tokens(family):
    """One model's layers differ, the other's heads are rotated in part."""
    config = eight_heads(tiny_models.FAMILIES[family])
    chosen = {"model": "x", "num_speculative_tokens": K}
    found = {}
    for degree in (1, 8):
        model = lively(tiny_models.model(config, 0, degree))
        one = tiny_models.engine(model, chosen, first_layer(model), tensor_parallel_size=degree, **OPTIONS)
        found[degree] = [texts(serve(one, PROMPTS, sampling, rounds=4)) for sampling in (GREEDY, SEEDED)]
        assert one.metrics.num_accepted_tokens > 0
    assert found[8] == found[1]
    assert {s.data.shape[2] for s in jax.tree.leaves(one.runner.cache)[0].addressable_shards} == {2}


def test_both_devices_alias_their_part_of_the_cache():
    two = new_engine("ngram", K, tensor_parallel_size=2)
    before = jax.tree.leaves(two.runner.cache)
    serve(two, PROMPTS[:2], GREEDY[:2])
    assert all(leaf.is_deleted() for leaf in before)


def test_a_vocabulary_that_does_not_divide_is_replicated():
    config = tiny_models.dataclasses.replace(tiny_models.BASE, vocab_size=63)
    embed = tiny_models.model(config, 0, 2).params["embed"]
    assert [s.data.shape for s in embed.addressable_shards] == [(63, 32)] * 2


def test_a_degree_that_does_not_divide_the_heads_is_refused():
    three = tiny_models.model(tiny_models.dataclasses.replace(tiny_models.BASE, num_heads=3, num_kv_heads=3))
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide num_heads=3: use one of 1, 3"):
        tiny_models.engine(three, tensor_parallel_size=2, **OPTIONS)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@cases("own", [1, 4], quick=[4])
def test_key_value_heads_that_are_fewer_are_copied(tmp_path, own):
    """Two of them over four devices, and so those of the draft: each device has one, and tokens are the same."""
    target = str(write_model(tmp_path / "target"))
    chosen = {"model": str(write_model(tmp_path / "draft", layers=1)), "num_speculative_tokens": K}
    prompts = {"prompts": [[1, 5, 9, 13, 5, 9], [1, 7]], "progress": False}
    params = [SamplingParams(max_tokens=16, temperature=0), SamplingParams(max_tokens=16, seed=3)]
    options = {"max_num_seqs": 2, "max_model_len": 64, "dtype": "float32"}

    def texts(cut, **more):
        llm = LLM(target, speculative_config=chosen | cut, **options, **more)
        found = [o.outputs[0].token_ids for o in llm.generate(**prompts, sampling_params=params)]
        return llm.engine.runner, found

    _, expected = texts({})
    four, found = texts({"draft_tensor_parallel_size": own}, tensor_parallel_size=4)
    assert found == expected
    for name, degree in (("target", 4), ("draft", own)):
        heads = four.configs[name].num_kv_heads
        assert (heads, four.configs[name].layers[0].kv_copies) == ((4, 2) if degree == 4 else (2, 1))
        leaf = jax.tree.leaves(getattr(four.cache, name))[0]
        assert {s.data.shape[2] for s in leaf.addressable_shards} == {2 * heads // degree}


def test_a_drafts_heads_must_divide_too():
    config = tiny_models.dataclasses.replace(tiny_models.small(), num_heads=1, num_kv_heads=1)
    narrow = tiny_models.Model(config, first_layer(target("llama", 2)).params)
    with pytest.raises(ValueError, match="draft_tensor_parallel_size=2 does not divide num_heads=1"):
        tiny_models.engine(target("llama", 2), {"model": "x"}, narrow, tensor_parallel_size=2, **OPTIONS)


def test_more_devices_than_there_are():
    count = jax.device_count()
    more = f"tensor_parallel_size={count + 1} needs that many devices, {count} found: lower it"
    with pytest.raises(ValueError, match=more):
        make_placement(count + 1)
    assert make_placement(count).mesh.shape == {"tp_draft": count, "tp_rest": 1}

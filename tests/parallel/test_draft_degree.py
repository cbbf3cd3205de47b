"""A draft that is cut into fewer parts than its target: the same tokens, and no more sums over devices than its own
degree needs, read from the compiled program."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxspec.bench.presets import HEADS
from jaxspec.loading.draft_degree import draft_degree
from jaxspec.loading.weights import resharded
from jaxspec.models.decoder import random_params
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import divisors, make_placement
from pallas_kernels.device import Device
from tests.support import hlo, tiny_models
from tests.support.lively_heads import reads
from tests.support.lively_models import OPTIONS, noisy, repeating
from tests.support.sizes import cases

K, LAYERS = 3, 2
CONFIG = dataclasses.replace(
    tiny_models.BASE, num_heads=8, num_kv_heads=8, head_dim=8, width=64, mlp_width=64, vocab_size=64, tied=False
)
PROMPTS = ((5, 8), repeating(16, 5, 2), repeating(33, 7, 3))
GREEDY = tuple(SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True) for _ in PROMPTS)
SEEDED = tuple(SamplingParams(max_tokens=16, temperature=0.6, seed=i, ignore_eos=True) for i in range(len(PROMPTS)))
BOTH = GREEDY[:1] + SEEDED[1:]  # in one batch: programs for each alone would take longer
DEGREES = [(size, own) for size in (1, 2, 4, 8) for own in divisors(size)]


@functools.cache
def target():
    return tiny_models.model(CONFIG)


@functools.cache
def draft(method: str):
    if method == "draft_model":
        return noisy(target())
    if method == "ngram":
        return None
    config = reads(HEADS["eagle3"](CONFIG), 0, 2, 1)
    return tiny_models.Model(config, random_params(config, jnp.float32, make_placement(), seed=1))


def engine(method: str, size: int, own: int):
    chosen = {"method": method, "num_speculative_tokens": K}
    chosen |= {} if method == "ngram" else {"model": "x"}
    degrees = {"tensor_parallel_size": size, "draft_tensor_parallel_size": own}
    return tiny_models.engine(target(), chosen, draft(method), **degrees, **OPTIONS)


def texts(found, sampling) -> list[list[int]]:
    requests = [found.add(prompt, params) for prompt, params in zip(PROMPTS, sampling, strict=True)]
    while found.busy:
        found.step(4)
    assert {r.finish_reason for r in requests} == {"length"}
    return [r.output for r in requests]


@functools.cache
def on_one(method: str, sampling: tuple) -> list[list[int]]:
    return texts(engine(method, 1, 1), sampling)


@pytest.mark.thorough
@cases(
    ("method", "degrees"),
    [(m, d) for m in ("draft_model", "eagle3") for d in DEGREES[1:]] + [("ngram", (n, n)) for n in (2, 4, 8)],
    quick=[("eagle3", (4, 2))],
    ids=str,
)
def test_tokens_are_those_of_one_device(method, degrees):
    assert texts(engine(method, *degrees), BOTH) == on_one(method, BOTH)


def of_launch(found) -> list[hlo.Instruction]:
    """The collectives of the engine's launch."""
    (program,) = [p.result() for key, p in found.runner.programs.compiled.items() if key[0] == "launch"]
    return [i for i in hlo.Program(program.as_text()).all if hlo.collectives([i])]


@cases("method", ["draft_model", "eagle3"], quick=["draft_model"])
@cases("degrees", [(2, 1), (4, 1), (8, 1), (4, 2), (8, 8)], quick=[(4, 2)], rest=[(4, 1), (8, 8)], ids=str)
def test_a_draft_pays_for_its_own_degree_only(method, degrees):
    """Two sums a layer and pass; one for the row that each device looks up a part of, one gathering of the logits."""
    size, own = degrees
    found = engine(method, size, own)
    texts(found, GREEDY)
    proposing = [i for i in of_launch(found) if "/propose/" in i.line]
    if own == 1:
        assert proposing == []
    else:
        layers = draft(method).config.num_layers
        sums = hlo.collectives(proposing)["all-reduce"]
        # The first pass stands before the loop over drafts, whose body is compiled once.
        assert 2 * 2 * layers <= sums <= 2 * (2 * layers + 2)
    rest = [i for i in of_launch(found) if "/propose/" not in i.line]
    assert 2 * LAYERS <= hlo.collectives(rest)["all-reduce"] <= 2 * LAYERS + 1


@cases("degrees", [(2, 1), (8, 1), (8, 4)], quick=[(8, 4)], ids=str)
def test_what_each_device_holds(degrees):
    """Of weights and pages: its part of the target, and of the draft as many parts as that is cut into."""
    size, own = degrees
    found = engine("eagle3", size, own)
    of = lambda x: sum(s.data.size for s in x.addressable_shards if s.device == jax.devices()[0])
    for name, degree in (("target", size), ("draft", own)):
        params = found.runner.params[name]
        for part in ("layers.0.qkv", "layers.0.out", "layers.0.gate_up", "layers.0.down"):
            assert of(params[part]) * degree == params[part].size, (name, part)
    assert all(of(x) * size == x.size for x in jax.tree.leaves(found.runner.cache.target))
    assert all(of(x) * own == x.size for x in jax.tree.leaves((found.runner.cache.draft, found.runner.cache.features)))
    assert set(found.runner.params["shared"]) == {"embed"}
    assert of(found.runner.params["shared"]["embed"]) * own == found.runner.params["shared"]["embed"].size


def test_a_small_draft_is_whole_on_every_device():
    wide = dataclasses.replace(CONFIG, width=16384, mlp_width=65536, num_heads=64, num_kv_heads=64, head_dim=256)
    assert draft_degree(CONFIG, 8, "bfloat16", Device("gpu")) == 1
    assert draft_degree(wide, 8, "bfloat16", Device("gpu")) == 8
    three = dataclasses.replace(wide, num_heads=48, num_kv_heads=6)
    assert draft_degree(three, 8, "bfloat16", Device("gpu")) == 2, "the largest that divides its heads"


def test_on_one_device_a_model_stays_as_it_is():
    assert resharded(target(), make_placement()) is target()


def test_what_does_not_divide_is_named():
    said = r"draft_tensor_parallel_size=3 does not divide tensor_parallel_size=4: use one of 1, 2, 4"
    with pytest.raises(ValueError, match=said):
        make_placement(4, draft_size=3)
    odd = dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=6, mlp_width=66)
    model = tiny_models.Model(odd, {name: x for name, x in tiny_models.model(odd).params.items() if "." not in name})
    degrees = {"tensor_parallel_size": 4, "draft_tensor_parallel_size": 4}
    said = r"draft_tensor_parallel_size=4 does not divide num_heads=6: use one of 1, 2"
    with pytest.raises(ValueError, match=said):
        tiny_models.engine(target(), {"model": "x"}, model, **degrees, **OPTIONS)

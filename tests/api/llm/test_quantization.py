"""Weights in 8 bits: less memory, the tokens of their dequantised values, and speculation that changes none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.api.llm import LLM
from jaxspec.common.errors import UserError
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.convert import convert
from jaxspec.loading.quantised import HEAD
from jaxspec.loading.weights import load
from jaxspec.models.decoder import parameters
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import make_placement
from pallas_kernels.weights import dense, nbytes
from pallas_kernels.weights.grouped import Grouped
from pallas_kernels.weights.scaled import Scaled
from tests.support.loaded import resolve
from tests.support.model_folders import write_model
from tests.support.published_models import FORMATS, publish
from tests.support.sizes import cases

OF_WEIGHTS = ("int8", "fp8", "fp8_tensor")  # forms that leave activations as they are
FOUR_BITS = ("int4_32", "int4_asym_32")
FORMS = (*OF_WEIGHTS, "fp8_dynamic", *FOUR_BITS)
HEADS = ("int8+head", "fp8_dynamic+head", "int4_32+head")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
PROMPTS = ["total of the items", "def total(items): return"]
OPTIONS = {"max_num_seqs": 2, "max_model_len": 96, "num_pages": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target", width=64, head_dim=32, mlp=192))


def is_quantised(x) -> bool:
    return isinstance(x, Scaled | Grouped)


def tokens(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@cases("form", FORMS, quick=["int8"])
def test_speculation_changes_no_token(folder, form):
    """With n-grams, and with the model itself as a draft in another form."""
    plain = LLM(folder, quantization=form, **OPTIONS)
    both = [GREEDY, SEEDED]  # in one batch: programs for each alone would take longer
    expected = tokens(plain, both)
    drafts = [{"method": "ngram"}, {"model": folder, "quantization": "fp8" if form == "int8" else "int8"}]
    for spec in drafts:
        llm = plain.speculating({"num_speculative_tokens": 3, "adaptive": False, **spec})
        assert tokens(llm, both) == expected
    assert sum(llm.metrics.num_accepted_tokens_per_pos) > 0
    assert tokens(plain, both) == expected, "the prompts' pages are there already"


@cases("form", (*OF_WEIGHTS, *FOUR_BITS), quick=["int4_asym_32"], rest=["fp8"])
def test_tokens_are_those_of_the_numbers_that_the_form_holds(folder, form):
    llm = LLM(folder, quantization=form, **OPTIONS)
    found = tokens(llm, GREEDY)
    known = parameters(llm.target.config)
    quantised = {name for name, p in known.items() if p.kind == "matrix" and not p.head}
    assert {name for name, x in llm.target.params.items() if is_quantised(x)} == quantised
    whole = LLM(folder, **OPTIONS)
    for name in quantised:
        held, own = np.asarray(dense(llm.target.params[name])), np.asarray(dense(whole.target.params[name]))
        assert 0 < np.abs(held - own).max() < np.abs(own).max() / (4 if form in FOUR_BITS else 10)
        assert llm.target.params[name].nbytes < own.nbytes / 3
    whole.target = dataclasses.replace(whole.target, params={name: dense(x) for name, x in llm.target.params.items()})
    assert tokens(whole.speculating(None), GREEDY) == found


@pytest.mark.parametrize("form", [None, *FORMS, *HEADS])
def test_bytes_are_known_before_anything_is_loaded(folder, form):
    model = load(resolve(folder), jnp.dtype("bfloat16"), make_placement(), quantization=form)
    assert weight_bytes(model.config, jnp.dtype("bfloat16"), 1, form) == nbytes(model.params)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")
@cases(
    "form",
    (*OF_WEIGHTS, *FOUR_BITS, "int8+head", "int8_dynamic+head"),
    quick=["int8"],
    rest=["int4_asym_32", "int8+head", "int8_dynamic+head"],
)
def test_over_two_devices_tokens_stay(folder, form):
    expected = tokens(LLM(folder, quantization=form, **OPTIONS), GREEDY)
    two = LLM(folder, quantization=form, tensor_parallel_size=2, **OPTIONS)
    assert tokens(two, GREEDY) == expected
    other = two.speculating({"model": folder, "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2})
    assert is_quantised(other.target.params["layers.0.qkv"]), "in another placement"
    assert tokens(other, GREEDY) == expected


def test_bad_forms_are_refused_in_a_line(folder):
    with pytest.raises(
        UserError, match="quantization='int3' is unknown: use one of int8, int8_dynamic, int8_block, fp8"
    ):
        LLM(folder, quantization="int3")
    with pytest.raises(UserError, match="quantization=8 is unknown"):
        SpeculativeConfig(model="draft", quantization=8)
    with pytest.raises(
        UserError, match=r"blocks of 128 do not divide the \d+ inputs of layers.0.\w+: take int8 or fp8"
    ):
        LLM(folder, quantization="fp8_block")
    with pytest.raises(UserError, match=r"blocks of 128 do not divide the 192 inputs of .*: take int4_64, in"):
        LLM(folder, quantization="int4")


@pytest.fixture(scope="module")
def published(folder, tmp_path_factory):
    """The model as it is published in 8 bits, and dequantised."""
    return [str(x) for x in publish(Path(folder), tmp_path_factory.mktemp("published") / "int8", FORMATS["W8A16"])]


def test_published_weights_say_what_their_dequantised_ones_say(folder, published):
    """Also as a draft, of a target in any form."""
    new, whole = published
    expected = tokens(LLM(whole, **OPTIONS), GREEDY)
    llm = LLM(new, **OPTIONS)
    assert any(isinstance(x, Scaled) for x in llm.target.params.values())
    assert tokens(llm, GREEDY) == expected
    drafted = LLM(whole, speculative_config={"model": new, "num_speculative_tokens": 2, "adaptive": False}, **OPTIONS)
    assert drafted.engine.runner.params["draft"]["layers.0.out"].values.dtype == jnp.int8
    assert tokens(drafted, GREEDY) == expected


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")
@pytest.mark.thorough
def test_published_weights_over_two_devices(published):
    new, _ = published
    assert tokens(LLM(new, tensor_parallel_size=2, **OPTIONS), GREEDY) == tokens(LLM(new, **OPTIONS), GREEDY)


def test_a_published_form_is_not_changed(published):
    with pytest.raises(UserError, match=r"quantization='fp8': .* already in 8 bits \(int8\).*: leave quantization out"):
        LLM(published[0], quantization="fp8", **OPTIONS)
    with pytest.raises(UserError, match=r"quantization='fp8': .* already in 8 bits \(int8\)"):
        LLM(published[1], speculative_config={"model": published[0], "quantization": "fp8"}, **OPTIONS)


@cases("form", ["int8", "fp8", "fp8_dynamic", "int4_32"], quick=["fp8"])
def test_tokens_are_those_of_the_numbers_that_the_head_holds(folder, form):
    llm = LLM(folder, quantization=f"{form}+head", **OPTIONS)
    without = LLM(folder, quantization=form, **OPTIONS)
    held, own = llm.target.params[HEAD], dense(without.target.params[HEAD])
    assert isinstance(held, Scaled)
    assert held.values.dtype == jnp.int8
    assert held.activations == ("int8" if form == "fp8_dynamic" else None)
    assert 0 < np.abs(np.asarray(dense(held)) - own).max() < np.abs(own).max() / 200
    found = tokens(llm, [GREEDY, SEEDED])
    if held.activations is None:
        params = without.target.params | {HEAD: dense(held)}
        without.target = dataclasses.replace(without.target, params=params)
        assert tokens(without.speculating(None), [GREEDY, SEEDED]) == found
    drafted = llm.speculating({"model": folder, "quantization": "int8+head", "num_speculative_tokens": 3})
    assert tokens(drafted, [GREEDY, SEEDED]) == found
    assert isinstance(drafted.engine.runner.params["draft"][HEAD], Scaled)


def test_a_checkpoint_in_8_bits_gets_a_head_in_8_bits(folder, tmp_path):
    new, whole = (str(x) for x in publish(Path(folder), tmp_path / "int8", FORMATS["W8A16"]))
    llm = LLM(new, quantization="int8+head", **OPTIONS)
    expected = LLM(whole, **OPTIONS)
    held = llm.target.params[HEAD]
    assert held.values.dtype == jnp.int8
    params = expected.target.params | {HEAD: dense(held)}
    expected.target = dataclasses.replace(expected.target, params=params)
    assert tokens(llm, GREEDY) == tokens(expected.speculating(None), GREEDY)


def test_heads_that_cannot_be_quantised_are_refused_in_a_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"quantization='int3\+head' is unknown: use one of int8, .*int8\+head"):
        LLM(folder, quantization="int3+head")
    with pytest.raises(UserError, match=r"quantization='gguf\+head' is unknown"):
        LLM(folder, quantization="gguf+head")
    tied = write_model(tmp_path / "tied")
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"'int8\+head': tied has no output head of its own .*: take 'int8'$"):
        LLM(str(tied), quantization="int8+head", **OPTIONS)
    with pytest.raises(UserError, match=r"is quantised while it is loaded: convert to 'fp8', and load that with"):
        convert(folder, tmp_path / "new", quantization="fp8_dynamic+head")

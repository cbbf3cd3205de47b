"""The suffix +head of the option `quantization`: the output head is in int8, whatever form other matrices have."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.common.errors import UserError
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.convert import convert
from jaxspec.loading.quantised import HEAD
from jaxspec.loading.weights import load
from jaxspec.parallel.placement import make_placement
from pallas_kernels.weights import dense, nbytes
from pallas_kernels.weights.scaled import Scaled
from tests.support.loaded import resolve
from tests.support.model_folders import write_model
from tests.support.published_models import FORMATS, publish
from tests.support.sizes import cases

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
PROMPTS = ["total of the items", "def total(items): return"]
OPTIONS = {"max_num_seqs": 2, "max_model_len": 96, "num_pages": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target", width=64, head_dim=32, mlp=192))


def tokens(llm, params=GREEDY):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


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


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")
@pytest.mark.thorough
@pytest.mark.parametrize("form", ["int8+head", "int8_dynamic+head"])
def test_over_two_devices_tokens_stay(folder, form):
    two = LLM(folder, quantization=form, tensor_parallel_size=2, **OPTIONS)
    assert tokens(two) == tokens(LLM(folder, quantization=form, **OPTIONS))


@cases("form", ["int8+head", "fp8_dynamic+head", "int4_32+head"], quick=["fp8_dynamic+head"], rest=[])
def test_bytes_are_known_before_anything_is_loaded(folder, form):
    model = load(resolve(folder), jnp.dtype("bfloat16"), make_placement(), quantization=form)
    assert weight_bytes(model.config, jnp.dtype("bfloat16"), 1, form) == nbytes(model.params)


def test_a_checkpoint_in_8_bits_gets_a_head_in_8_bits(folder, tmp_path):
    new, whole = (str(x) for x in publish(Path(folder), tmp_path / "int8", FORMATS["W8A16"]))
    llm = LLM(new, quantization="int8+head", **OPTIONS)
    expected = LLM(whole, **OPTIONS)
    held = llm.target.params[HEAD]
    assert held.values.dtype == jnp.int8
    params = expected.target.params | {HEAD: dense(held)}
    expected.target = dataclasses.replace(expected.target, params=params)
    assert tokens(llm) == tokens(expected.speculating(None))


def test_bad_values_are_refused_in_a_line(folder, tmp_path):
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

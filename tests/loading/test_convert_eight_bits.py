"""Models converted to 8 bits: what is loaded again is what was quantised, in orbax and in safetensors."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints import orbax, published
from checkpoints.orbax_eight_bits import SCALE
from jaxspec.common.errors import UserError
from jaxspec.inspect import info
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.convert import convert
from jaxspec.loading.quantised import forms_of_checkpoint
from jaxspec.loading.weights import load as load_model
from jaxspec.models.decoder import parameters
from jaxspec.options.quantization import FORMS
from jaxspec.parallel.placement import make_placement
from pallas_kernels import weights
from pallas_kernels.weights.scaled import Scaled
from tests.checkpoints.files import fails
from tests.drafters.references import eagle3, medusa
from tests.drafters.references.common import Shape
from tests.support.loaded import load, resolve
from tests.support.model_folders import write_model
from tests.support.published_models import FORMATS, publish, tensors_of
from tests.support.sizes import cases

dense = jax.jit(weights.dense)  # each operation by itself takes longer to compile
WRITTEN = [name for name, form in FORMS.items() if not form.activations]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense", width=256, head_dim=128, mlp=256)


def quantised(folder: Path, form: str | None = None):
    return load_model(resolve(folder), jnp.dtype("float32"), make_placement(), quantization=form)


@cases(
    ("form", "to"),
    list(itertools.product(WRITTEN, ["jaxspec", "safetensors"])),
    quick=[("fp8_block", "jaxspec"), ("int4_asym", "safetensors")],
    rest=[("int8", "jaxspec"), ("int8_block", "safetensors"), ("fp8_tensor", "safetensors")],
)
def test_what_is_loaded_is_what_was_quantised(form, to, folder, tmp_path):
    """A folder in 8 bits holds the weights that would be made on load; one scale a tensor has one for each part."""
    convert(str(folder), tmp_path / "new", to=to, quantization=form)
    expected, found = quantised(folder, form), quantised(tmp_path / "new")
    parts = form == "fp8_tensor" and to == "safetensors"
    for name, x in expected.params.items():
        y = found.params[name]
        assert type(x) is type(y), name
        if parts and name.endswith(("qkv", "gate_up")):
            assert np.abs(dense(x) - dense(y)).max() < 0.1 * np.abs(dense(x)).max()
        else:
            np.testing.assert_array_equal(dense(x), dense(y), err_msg=name)
    model = resolve(tmp_path / "new")
    known = checkpoints.stored_quantization(model.source)
    assert known is not None
    assert known.name == form
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(found.params))
    assert weight_bytes(model.config, jnp.dtype("float32"), 1, None, forms_of_checkpoint(model, None)) == size
    facts = info.describe(str(tmp_path / "new"))["model"]
    assert (facts["quantization"], facts["weight_bytes"]) == (form, size)
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file() and "tokenizer" not in path.name]
    stored = sum(path.stat().st_size for path in files)
    assert stored < size + 50_000, "the files are in 8 bits, too"


def test_no_scale_of_a_matrix_of_zeros_is_zero(folder, tmp_path):
    zeros = shutil.copytree(folder, tmp_path / "zeros")
    tensors = tensors_of(zeros)
    tensors["model.layers.0.mlp.down_proj.weight"][3] = 0
    save_file(tensors, zeros / "model.safetensors")
    convert(str(zeros), tmp_path / "new", to="safetensors", quantization="int8")
    np.testing.assert_array_equal(np.asarray(dense(quantised(tmp_path / "new").params["layers.0.down"]))[:, 3], 0)


@cases("name", ["FP8", "W8A16"], quick=["FP8"])
def test_a_published_model_becomes_orbax_as_it_is(name, folder, tmp_path):
    new, _ = publish(folder, tmp_path / "new", FORMATS[name])
    convert(str(new), tmp_path / "orbax")
    for where, x in quantised(new).params.items():
        y = quantised(tmp_path / "orbax").params[where]
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=where)
    known = checkpoints.stored_quantization(checkpoints.resolve(str(tmp_path / "orbax")))
    assert known is not None
    assert known.name == FORMATS[name].form


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")
def test_orbax_over_two_devices(folder, tmp_path):
    convert(str(folder), tmp_path / "whole", quantization="int8")
    two = load(tmp_path / "whole", placement=make_placement(2)).params
    for where, x in quantised(tmp_path / "whole").params.items():
        np.testing.assert_array_equal(dense(two[where]), dense(x), err_msg=where)
    narrow = write_model(tmp_path / "narrow", width=128, head_dim=64, mlp=128)
    convert(str(narrow), tmp_path / "blocks", quantization="int8_block")
    load(tmp_path / "blocks", placement=make_placement(2))
    middle = write_model(tmp_path / "middle", width=384, head_dim=96, mlp=384)
    convert(str(middle), tmp_path / "three", quantization="int8_block")
    with fails(UserError, "layers.0.", "blocks of 128", "192 values a device", "tensor_parallel_size"):
        load(tmp_path / "three", placement=make_placement(2))


def test_arrays_of_orbax_are_quantised_while_they_are_loaded(folder, tmp_path, monkeypatch):
    """Never is more than a batch of unquantised arrays in memory."""
    checkpoints.save(tmp_path / "whole", load(folder).params, resolve(folder).config, fingerprint="0" * 64)
    monkeypatch.setattr(orbax, "BATCH", 300_000)
    loaded, sizes = orbax.load_arrays, []

    def counted(path, abstract, stored):
        arrays = loaded(path, abstract, stored)
        sizes.append(sum(x.nbytes for x in arrays.values()))
        return arrays

    monkeypatch.setattr(orbax, "load_arrays", counted)
    found, expected = quantised(tmp_path / "whole", "int8"), quantised(folder, "int8")
    assert len(sizes) > 4
    largest = max(x.size * 4 for x in found.params.values())
    assert max(sizes) <= max(300_000, largest)
    for where, x in expected.params.items():
        np.testing.assert_array_equal(dense(found.params[where]), dense(x), err_msg=where)


@pytest.mark.parametrize("to", ["jaxspec", "safetensors"])
def test_weights_that_are_not_finite(to, folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = tensors_of(broken)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = np.inf
    save_file(tensors, broken / "model.safetensors")
    with fails(UserError, "down", "not finite"):
        convert(str(broken), tmp_path / "new", to=to, quantization="fp8")


def test_damaged_orbax_folders(folder, tmp_path):
    convert(str(folder), tmp_path / "new", quantization="int8")
    model = resolve(tmp_path / "new")
    arrays = orbax.flat(quantised(tmp_path / "new").params)
    form = [FORMS["int8"]]

    def refused(changed: dict, *words: str) -> None:
        shutil.rmtree(tmp_path / "new")
        checkpoints.save(tmp_path / "new", changed, model.config, fingerprint="0" * 64, forms=form)
        with fails(UserError, str(tmp_path), *words):
            quantised(tmp_path / "new")

    scale = "layers.0.out.scale"
    without = {name: x for name, x in arrays.items() if name != scale}
    refused(without, "layers.0.out has quantised values, but no layers.0.out.scale")
    refused(arrays | {scale: arrays[scale][:-1]}, f"{scale} of shape (255, 1) does not fit")
    refused(arrays | {scale: arrays[scale].at[4].set(0)}, f"{scale} holds scales that are not positive")
    refused(arrays | {scale: arrays[scale].at[4].set(jnp.nan)}, f"{scale} holds scales that are not positive")
    raw = json.loads((tmp_path / "new" / "jaxspec.json").read_text())
    for wrong in (3, [3], [{"dtype": "int8"}]):
        (tmp_path / "new" / "jaxspec.json").write_text(json.dumps(raw | {"quantization": wrong}))
        with fails(UserError, "jaxspec.json"):
            quantised(tmp_path / "new")


def test_a_head_published_in_8_bits_becomes_floats(tmp_path):
    shape = Shape(vocab_size=320, width=64, kv_heads=4, head_dim=8, mlp=48, layers=6)
    eagle3.write(tmp_path / "head", seed=1, target=shape)
    new, whole = publish(tmp_path / "head", tmp_path / "new", FORMATS["FP8_DYNAMIC"], heads=True)
    convert(str(new), tmp_path / "floats")
    found, expected = tensors_of(tmp_path / "floats"), tensors_of(whole)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-6)
    assert not published.of_folder(tmp_path / "floats")


def test_what_is_refused(folder, tmp_path):
    free = tmp_path / "free"

    def refused(*words: str, source: Path = folder, **options) -> None:
        with fails(UserError, *words):
            convert(str(source), free, **options)
        assert not free.exists()

    refused("quantization='int3' is unknown", quantization="int3")
    refused("'fp8_dynamic' rounds activations", "convert to 'fp8'", quantization="fp8_dynamic")
    refused("'int8_dynamic' rounds activations", "convert to 'int8'", quantization="int8_dynamic")
    refused("quantization='gguf': blocks of a GGUF file are not written", quantization="gguf")
    refused("exclude each other", quantization="int8", weight_bits=8)
    refused("to='safetensors' writes quantised models", to="safetensors")
    refused("'speculators' writes no quantised heads", to="speculators", quantization="int8", target=str(folder))
    refused("target=", "'safetensors'", to="safetensors", quantization="int8", target=str(folder))
    narrow = write_model(tmp_path / "narrow")
    for to in ("jaxspec", "safetensors"):
        refused("blocks of 128 do not divide", source=narrow, to=to, quantization="fp8_block")
    convert(str(folder), tmp_path / "orbax", quantization="int8")
    refused("needs a model with a config.json", source=tmp_path / "orbax", to="safetensors", quantization="int8")
    refused("already quantised (int8)", source=tmp_path / "orbax", weight_bits=8)
    refused("already in 8 bits (int8)", source=tmp_path / "orbax", quantization="fp8")
    new, _ = publish(folder, tmp_path / "new", FORMATS["FP8_DYNAMIC"])
    refused("already quantised in safetensors", source=new, to="safetensors", quantization="fp8")
    medusa.write(tmp_path / "head", seed=1, target=Shape(320, 64, 4, 8, 48, 6))
    for to in ("jaxspec", "safetensors"):
        refused("is a drafting head", source=tmp_path / "head", to=to, quantization="int8")
    assert isinstance(quantised(tmp_path / "orbax", "int8").params["layers.0.out"], Scaled)


@pytest.mark.parametrize("shape", [(64,), (64, 0), ()])
def test_scales_of_another_shape_are_told_in_a_line(shape, folder, tmp_path, monkeypatch):
    convert(str(folder), tmp_path / "new", quantization="int4")
    model = resolve(tmp_path / "new")
    known = parameters(model.config)
    stored = orbax.stored_arrays(tmp_path / "new" / orbax.PARAMS)
    damaged = stored | {"layers.0.down" + SCALE: jax.ShapeDtypeStruct(shape, jnp.float32)}
    monkeypatch.setattr(orbax, "stored_arrays", lambda path: damaged)
    with fails(UserError, "new"):
        orbax.stored_forms(tmp_path / "new", model.config, known)

"""Matrices of GGUF files that stay in their blocks have the numbers that the gguf package dequantises."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import forms
from checkpoints.gguf import Weights
from checkpoints.gguf_blocks import FIELDS
from jaxspec.common.embedded import MODEL
from jaxspec.common.errors import UserError
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.quantised import forms_of_checkpoint
from jaxspec.loading.weights import load as load_model
from jaxspec.parallel.placement import make_placement
from pallas_kernels.weights import dense, grouped, nbytes
from pallas_kernels.weights.grouped import Grouped
from tests.checkpoints.files import finish, write_gguf
from tests.support.loaded import load, resolve
from tests.support.model_folders import write_model

KINDS = [kind for kind in gguf.GGMLQuantizationType if kind.name.lower() in FIELDS]
TWO = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")


def write(path, kind, columns=512):
    """A file with a tensor of random blocks, whose scales are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (6, columns // block * size), np.uint8)
    blocks = packed.view(FIELDS[kind.name.lower()])
    for name in {"d", "dmin", "m"} & set(blocks.dtype.names):
        blocks[name] = rng.normal(size=blocks.shape)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    finish(writer)
    return gguf.quants.dequantize(packed, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_hold_what_the_package_dequantises(kind, tmp_path):
    expected = write(tmp_path / "m.gguf", kind)
    held = Weights(tmp_path / "m.gguf", blocks=True).grouped("x")
    assert held is not None
    everything = (slice(None), slice(None))
    integers = held.integers(everything)
    assert integers.shape == expected.shape
    np.testing.assert_array_equal(held.integers((slice(1, 4), slice(5, 300))), integers[1:4, 5:300])
    layout = forms.layout(held.form)
    assert layout is not None

    def make(field, i, shape, dtype):
        x = grouped.packed(integers, layout.bits)[i] if field == "values" else held.factor(field, i, everything)
        assert (x.shape, x.dtype) == (shape, np.dtype(dtype)), field
        return jnp.asarray(x)

    weight = grouped.arrays(layout, expected.shape[::-1], make, "float32")
    np.testing.assert_allclose(dense(weight).T, expected, rtol=1e-5, atol=1e-5)
    stored = gguf.GGML_QUANT_SIZES[kind]
    assert nbytes(weight) <= expected.size / stored[0] * stored[1] * 1.03, "memory has the file's bytes"


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=TWO)])
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2", "Q4_0"), ("qwen2", "Q4_1"), ("qwen2", "Q8_0"), ("phi3", "Q4_1")]
)
def test_a_model_in_its_blocks_is_the_dequantised_one(family, kind, devices, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", family, gguf.GGMLQuantizationType[kind])
    same_as_dequantised(path, make_placement(devices))


@pytest.mark.thorough
def test_the_embedded_model_in_its_blocks_is_the_dequantised_one():
    """A Llama, whose file has the rows of queries and keys in another order."""
    params = same_as_dequantised(MODEL, make_placement())
    assert nbytes(params) < 0.4 * sum(x.size * 4 for x in params.values())


def same_as_dequantised(path, placement):
    found = load_model(resolve(path), jnp.dtype("float32"), placement, quantization="gguf")
    expected = load(path, placement=placement).params
    held = {name for name, x in found.params.items() if isinstance(x, Grouped)}
    assert {"layers.0.qkv", "layers.0.gate_up"} <= held
    assert expected.keys() == found.params.keys()
    for name in [name for name in expected if ".0." in name]:
        np.testing.assert_allclose(dense(found.params[name]), expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
    stored = forms_of_checkpoint(resolve(path), "gguf")
    assert weight_bytes(found.config, jnp.dtype("float32"), placement.degree, "gguf", stored) == sum(
        shard.data.nbytes for x in jax.tree.leaves(found.params) for shard in x.addressable_shards[:1]
    )
    return found.params


def test_blocks_are_of_gguf_files(tmp_path):
    folder = write_model(tmp_path / "folder")
    with pytest.raises(UserError, match=r"quantization='gguf' keeps the blocks of a GGUF file, .* is of format 'hf'"):
        load_model(resolve(folder), jnp.dtype("float32"), make_placement(), quantization="gguf")


def test_a_file_without_blocks_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen2")
    with pytest.raises(UserError, match=r"m.gguf holds no matrix in blocks of Q8_0, .*: leave out quantization='gguf'"):
        load_model(resolve(path), jnp.dtype("float32"), make_placement(), quantization="gguf")
    with pytest.raises(UserError, match=r"m.gguf holds no matrix in blocks"):
        weight_bytes(resolve(path).config, jnp.dtype("float32"), 1, "gguf", forms_of_checkpoint(resolve(path), "gguf"))

"""Checkpoints that are published in 8 bits: values and scales stay as they are, and what is not read is refused."""

from __future__ import annotations

import copy
import functools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints import published
from checkpoints.safetensors import Shards
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.quantised import check_same_form, forms_of_checkpoint
from jaxspec.loading.weights import load as load_model
from jaxspec.models.decoder import parameters
from jaxspec.options.quantization import FORMS
from jaxspec.parallel.placement import make_placement
from pallas_kernels.weights import dense
from pallas_kernels.weights.scaled import Scaled
from tests.checkpoints.files import fails, rewrite
from tests.drafters.references import eagle3
from tests.drafters.references.common import Shape
from tests.support.loaded import load, load_draft, resolve
from tests.support.model_folders import write_model
from tests.support.published_models import FORMATS, publish, tensors_of
from tests.support.root import ROOT
from tests.support.sizes import cases

GOLDEN = ROOT / "tests/golden/published"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose queries, keys and values have heads of half a block, and whose MLP has one and a half a device."""
    return write_model(tmp_path_factory.mktemp("models") / "dense", width=256, head_dim=64, mlp=384)


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    """Folders in a format: in 8 bits, and dequantised."""
    root = tmp_path_factory.mktemp("published")
    return functools.cache(lambda name: publish(folder, root / name.replace(" ", "_"), FORMATS[name]))


def in_8_bits(params: dict[str, Any]) -> dict[str, Scaled]:
    return {name: x for name, x in params.items() if isinstance(x, Scaled)}


@pytest.mark.parametrize("scheme", sorted(path.name for path in GOLDEN.iterdir()))
def test_what_the_library_writes_is_what_it_reads(scheme):
    shards = Shards(GOLDEN / scheme)
    everything = (slice(None),) * 2
    assert shards.shapes().keys() == {DOWN, "dequantised"}
    np.testing.assert_array_equal(shards.read(DOWN, everything), shards.read("dequantised", everything))
    part = (slice(1, 5), slice(37, 200))
    np.testing.assert_array_equal(shards.read(DOWN, part), shards.read("dequantised", part))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_scales_stay(name, devices, made):
    """Every matrix but the head stays in 8 bits, over several devices, too, and is that of the dequantised folder."""
    if jax.device_count() < devices:
        pytest.skip("needs 2 devices: --xla_force_host_platform_device_count")
    new, whole = made(name)
    placement = make_placement(devices)
    found, expected = load(new, placement=placement), load(whole, placement=placement)
    known = parameters(found.config)
    quantised = in_8_bits(found.params)
    assert quantised.keys() == {name for name, p in known.items() if p.kind == "matrix" and not p.head}
    for where, x in expected.params.items():
        np.testing.assert_allclose(dense(found.params[where]), x, rtol=1e-6, err_msg=where)
    stored = tensors_of(new)
    if not FORMATS[name].packed:
        np.testing.assert_array_equal(
            np.asarray(quantised["layers.0.down"].values).view(np.uint8), stored[DOWN].view(np.uint8)
        )
    scale = stored[DOWN + FORMATS[name].scale].astype(np.float32)
    assert set(np.unique(np.asarray(quantised["layers.0.down"].scale))) == set(np.unique(scale))


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC"])
def test_rows_of_fused_matrices_keep_their_scales(name, tmp_path):
    """Also where the rows of queries and keys are reordered, because only a part of each head is rotated."""
    in_float32 = lambda tensors: {key: x.astype(np.float32) for key, x in tensors.items()}
    new, whole = publish(rewrite(tmp_path / "dense", "phi4-mini", in_float32), tmp_path / "new", FORMATS[name])
    found, expected = load(new), load(whole)
    assert {"layers.0.qkv", "layers.1.gate_up"} <= in_8_bits(found.params).keys()
    for where, x in expected.params.items():
        np.testing.assert_allclose(dense(found.params[where]), x, rtol=1e-6, err_msg=where)


@pytest.mark.parametrize("name", FORMATS)
def test_forms_and_bytes_are_known_from_config_json(name, made, tmp_path):
    new, _ = made(name)
    found = load(new, jnp.bfloat16)
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    model = resolve(tmp_path)
    forms = forms_of_checkpoint(model, None)
    assert forms is not None
    assert weight_bytes(model.config, jnp.dtype("bfloat16"), 1, None, forms) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(found.params)
    )
    form = checkpoints.stored_quantization(model.source)
    assert form is not None
    assert form.name == FORMATS[name].form


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_activations_keep_the_dtype_that_is_asked_for(dtype, made, caplog):
    """The log says so, once."""
    with caplog.at_level(logging.WARNING):
        found = load(made("FP8_DYNAMIC")[0], dtype)
    assert {x.dtype for x in in_8_bits(found.params).values()} == {jnp.dtype(dtype)}
    assert [record.getMessage() for record in caplog.records if "8-bit activations" in record.getMessage()] == [
        "FP8_DYNAMIC is published in fp8 with 8-bit activations or caches: here these keep their dtype, which rounds "
        "less (quantization='fp8_dynamic' rounds the activations of a checkpoint in fp8, 'int8_dynamic' in int8)"
    ]


def test_a_float_matrix_stays_one(folder, tmp_path):
    """Modules that are left out stay as they are; a merged matrix of which one part is left out is dequantised."""
    ignored = ["lm_head", "model.layers.0.self_attn.k_proj", "re:.*layers.1.mlp.*"]
    new, whole = publish(folder, tmp_path / "new", FORMATS["W8A8"], ignore=ignored)
    stored, plain = tensors_of(new), tensors_of(whole)
    left = {name for name in plain if "0.self_attn.k_proj" in name or "layers.1.mlp" in name}
    kept = {name: x for name, x in stored.items() if name.removesuffix("_scale") not in left}
    save_file(kept | {name: plain[name] for name in left}, new / "model.safetensors")
    found, expected = load(new), load(whole)
    assert in_8_bits(found.params).keys() == {
        *("layers.0.out", "layers.0.gate_up", "layers.0.down", "layers.1.qkv", "layers.1.out")
    }
    for where, x in expected.params.items():
        np.testing.assert_allclose(dense(found.params[where]), x, rtol=1e-6, err_msg=where)
    forms = forms_of_checkpoint(resolve(new), None)
    assert forms is not None
    assert forms(parameters(found.config)).keys() == in_8_bits(found.params).keys()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")
@cases("name", FORMATS, quick=["fp8 blocks", "W8A16"])
def test_key_value_heads_that_are_copied(name, tmp_path):
    """More devices than key-value heads: each has a copy of the head's values and scales."""
    new, _ = publish(write_model(tmp_path / "one", width=256, kv_heads=1, head_dim=32), tmp_path / "new", FORMATS[name])
    one, two = load(new).params["layers.0.qkv"], load(new, placement=make_placement(2)).params["layers.0.qkv"]
    queries, key, value = np.split(np.asarray(dense(one)), [128, 160], axis=1)
    copied = np.concatenate([queries[:, :64], key, value, queries[:, 64:], key, value], axis=1)
    np.testing.assert_array_equal(dense(two), copied)


def test_modules_that_are_named():
    """By compressed-tensors in full or by a pattern, the most exact first; for fp8 by the beginning or end of names."""
    config = copy.deepcopy(W8)
    groups = config["config_groups"]
    by_tensor = groups["group_0"]["weights"] | {"strategy": "tensor"}
    groups["group_1"] = {"targets": ["re:.*down_proj$", "model.layers.1.mlp.up_proj"], "weights": by_tensor}
    config["ignore"] = ["lm_head", "re:.*layers.3.*"]
    found = published.parse({"quantization_config": config})
    assert found is not None
    forms = {
        "model.layers.1.mlp.gate_proj": 1,
        "model.layers.1.mlp.up_proj": None,
        "model.layers.2.mlp.down_proj": None,
    }
    for module, outputs in forms.items():
        form = found.form(module)
        assert form is not None
        assert form.outputs == outputs
    assert found.form("lm_head") is found.form("model.layers.3.mlp.down_proj") is None
    skipped = ["lm_head", "model.layers.1", "o_proj"]
    found = published.parse({"quantization_config": FP8 | {"modules_to_not_convert": skipped}})
    assert found is not None
    assert found.form("model.layers.11.mlp.up_proj")
    for module in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj"):
        assert found.form(module) is None


def test_a_head_in_8_bits_is_dequantised(folder, tmp_path):
    new, whole = publish(folder, tmp_path / "new", FORMATS["FP8_DYNAMIC"], heads=True)
    found = load(new)
    assert not isinstance(found.params["head"], Scaled)
    np.testing.assert_allclose(found.params["head"], load(whole).params["head"], rtol=1e-6)


def test_a_drafting_head(tmp_path):
    target = write_model(tmp_path / "target", width=64, kv_heads=4, layers=6)
    shape = Shape(vocab_size=320, width=64, kv_heads=4, head_dim=8, mlp=48, layers=6)
    eagle3.write(tmp_path / "head", seed=1, target=shape)
    new, whole = publish(tmp_path / "head", tmp_path / "new", FORMATS["W8A16"])
    model = load(target)
    found, expected = (load_draft(head, target, model=model) for head in (new, whole))
    quantised = in_8_bits(found.params)
    assert quantised.keys() == {
        name for name, p in parameters(found.config).items() if p.kind == "matrix" and not p.head
    }
    for where, x in expected.params.items():
        np.testing.assert_allclose(dense(found.params[where]), dense(x), rtol=1e-6, err_msg=where)


def test_the_option_of_the_same_form(made):
    for name, form in (("W8A16", "int8"), ("fp8 blocks", "fp8_block"), ("FP8", "fp8_tensor")):
        model = resolve(made(name)[0])
        same = load_model(model, jnp.dtype("float32"), make_placement(), quantization=form)
        assert in_8_bits(same.params)
    with fails(UserError, "quantization='int8'", "fp8_tensor", "leave quantization out"):
        load_model(model, jnp.dtype("float32"), make_placement(), quantization="int8")


def test_activations_are_rounded_where_that_is_asked_for(made):
    model = resolve(made("FP8_DYNAMIC")[0])
    for name, activations in ((None, None), ("fp8", None), ("fp8_dynamic", "float8_e4m3fn")):
        params = load_model(model, jnp.dtype("float32"), make_placement(), quantization=name).params
        assert {x.activations for x in params.values() if isinstance(x, Scaled)} == {activations}
    fp8, blocks = FORMS["fp8"], FORMS["fp8_block"]
    check_same_form("mixed", published.Published("fp8", ((fp8, ()), (blocks, ()))), "fp8")
    with fails(UserError, "quantization='fp8_dynamic'", "already in 8 bits"):
        check_same_form("mixed", published.Published("fp8", ((fp8, ()), (blocks, ()))), "fp8_dynamic")


def test_blocks_that_do_not_divide(tmp_path):
    """A block is cut while 32 inputs or more are left of it. One line names the parameter and the remedy."""
    dense = write_model(tmp_path / "dense", width=256, mlp=272)
    new, _ = publish(dense, tmp_path / "new", FORMATS["fp8 blocks"])
    with fails(UserError, "layers.0.down", "blocks of 128 inputs", "272 inputs", "tensor_parallel_size"):
        load(new)


FP8 = FORMATS["fp8 blocks"].config
W8 = FORMATS["W8A16"].config


def weights(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(W8)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


REFUSED: dict[str, tuple[Any, str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt"),
    "MXFP4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "quant_method='mxfp4' (MXFP4)"),
    "compressed MXFP4": (W8 | {"format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
    "compressed NVFP4": (W8 | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    "awq": ({"quant_method": "awq", "bits": 8}, "quant_method='awq' with bits=8"),
    "gptq": ({"quant_method": "gptq", "bits": 8}, "quant_method='gptq' with bits=8"),
    "mlx": ({"group_size": 64, "bits": 8}, "MLX"),
    "unknown": ({"quant_method": "newest"}, "quant_method='newest'"),
    "no string": ({"quant_method": 8}, "quant_method=8"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
    "other blocks": (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size=[64, 64]"),
    "2 bits": (weights(num_bits=2), "num_bits=2"),
    "zero points": (weights(symmetric=False), "symmetric=false"),
    "order": (weights(actorder="group"), "actorder='group'"),
    "small groups": (weights(strategy="group", group_size=32), "group_size=32"),
    "other structure": (weights(strategy="block", block_structure=[64, 128]), "block_structure=[64, 128]"),
    "strategy": (weights(strategy="tensor_group", group_size=16), "strategy='tensor_group'"),
    "type": (weights(type="posit"), "type='posit'"),
    "format": (W8 | {"format": "marlin-24"}, "format='marlin-24'"),
    "sparse": (W8 | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
    "rotated": (W8 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "preset": (W8 | {"config_groups": {"W8A16": ["Linear"]}}, "the scheme 'W8A16'"),
    "caches only": (W8 | {"config_groups": {"group_0": {"targets": ["Attention"]}}}, "without weights"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_schemes_that_are_refused(what, folder, tmp_path):
    config, word = REFUSED[what]
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with fails(UnsupportedError, word, "is not read", "compressed-tensors and fp8", "quantization='int8'"):
        checkpoints.load_config(checkpoints.Source("hf", tmp_path, "published"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("int8", ["'int8' must be an object"]),
        (W8 | {"config_groups": []}, ["config_groups=[]"]),
        (W8 | {"config_groups": {"group_0": 3}}, ["group_0"]),
        (W8 | {"ignore": "lm_head"}, ["ignore='lm_head'", "list"]),
        (W8 | {"ignore": ["re:*"]}, ["re:*", "no pattern"]),
        (FP8 | {"modules_to_not_convert": [3]}, ["modules_to_not_convert=[3]"]),
    ],
)
def test_entries_of_a_wrong_type(config, words):
    for key in ("quantization_config", "compression_config"):
        with fails(UserError, f"{key}: ", *words):
            published.parse({key: config})


def test_mlx_by_its_own_key():
    with fails(UnsupportedError, "MLX"):
        published.parse({"quantization": {"bits": 8}})
    assert published.parse({}) is None


def damaged(tensors: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    name = DOWN
    scale = tensors[name + "_scale"].copy()
    if what == "no scale":
        return {key: x for key, x in tensors.items() if key != name + "_scale"}
    if what == "shape":
        return tensors | {name + "_scale": scale[:-1]}
    if what == "float weight":
        return tensors | {name: tensors[name].astype(np.float32)}
    if what == "integers":
        return tensors | {name: tensors[name].view(np.int8)}
    if what == "zero point":
        return tensors | {name + "_zero_point": np.ones(scale.shape, np.int8)}
    if what == "order":
        return tensors | {name + "_g_idx": np.zeros(384, np.int32)}
    if what == "e5m2":
        return tensors | {name: tensors[name].view(jnp.float8_e5m2)}
    if what == "e8m0":
        return tensors | {name + "_scale": scale.astype(np.float64)}
    scale[3] = float(what)
    return tensors | {name + "_scale": scale}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no scale", ["has 8-bit values, but no", "weight_scale"]),
        ("shape", ["shape (255, 1)", "expected (256, 1) for fp8"]),
        ("float weight", ["holds scales of", "stored as F32"]),
        ("integers", ["stored as int8", "config.json has fp8"]),
        ("zero point", ["weight_zero_point is not 0", "symmetric"]),
        ("order", ["weight_g_idx", "actorder"]),
        ("e5m2", ["F8_E5M2", "only F8_E4M3"]),
        ("e8m0", ["weight_scale is stored as F64"]),
        ("nan", ["weight_scale holds nan", "positive and finite"]),
        ("inf", ["weight_scale holds inf"]),
        ("0", ["weight_scale holds 0.0"]),
        ("-1", ["weight_scale holds -1.0"]),
    ],
)
def test_tensors_that_do_not_belong_together(what, words, made, tmp_path):
    new, _ = made("FP8_DYNAMIC")
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    save_file(damaged(tensors_of(new), what), tmp_path / "model.safetensors")
    with fails(UserError, str(tmp_path), "model.layers.0.mlp.down_proj.weight", *words):
        load_model(resolve(tmp_path), jnp.dtype("float32"), make_placement())


@pytest.mark.parametrize("shape", [[256, 381], [257, 384], [256], None])
def test_packed_values_of_another_shape(shape, made, tmp_path):
    new, _ = made("W8A16")
    tensors = tensors_of(new)
    tensors.pop(DOWN + "_shape")
    if shape:
        tensors[DOWN + "_shape"] = np.asarray(shape)
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with fails(UserError, "down_proj.weight"):
        load(tmp_path)


@cases("columns", [5, 6, 7, 8], quick=[6])
def test_any_part_of_packed_values(columns, tmp_path):
    x = np.random.default_rng(0).integers(-128, 128, (3, columns)).astype(np.int8)
    words = np.pad(x.view(np.uint8) ^ np.uint8(128), ((0, 0), (0, -columns % 4))).view(np.int32)
    scale = np.float32([[0.5], [2], [1]])
    tensors = {"a.weight_packed": words, "a.weight_shape": np.asarray(x.shape), "a.weight_scale": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": W8}))
    shards = Shards(tmp_path)
    for first in range(columns):
        for last in range(first, columns + 1):
            part = (slice(1, 3), slice(first, last))
            np.testing.assert_array_equal(shards.read("a.weight", part), (x * scale)[part])

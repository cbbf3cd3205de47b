"""Checkpoints that are published in 4 bits: integers, scales and zero points stay, and what is not read is refused."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints import published
from checkpoints.safetensors import Shards
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.inspect.fit import weight_bytes
from jaxspec.loading.quantised import forms_of_checkpoint
from jaxspec.models.decoder import parameters
from jaxspec.parallel.placement import make_placement
from pallas_kernels.weights import dense
from pallas_kernels.weights.grouped import Grouped
from tests.support.four_bit_models import AWQ, FORMATS, FOUR, gptq
from tests.support.loaded import load, resolve
from tests.support.model_folders import write_model
from tests.support.published_models import compressed, publish
from tests.support.root import ROOT

GOLDEN = ROOT / "tests/golden/four_bits"
DOWN = "model.layers.0.mlp.down_proj"
TWO = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices: --xla_force_host_platform_device_count")


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders in a format: in 4 bits, and dequantised."""
    root = tmp_path_factory.mktemp("four")
    folder = write_model(root / "dense", layers=1, width=256, head_dim=64, mlp=256)
    return functools.cache(lambda name: publish(folder, root / name.replace(" ", "_"), FORMATS[name]))


@pytest.mark.parametrize("scheme", sorted(path.name for path in GOLDEN.iterdir()))
def test_matrices_are_those_that_the_libraries_read(scheme):
    shards = Shards(GOLDEN / scheme)
    name, everything = f"{DOWN}.weight", (slice(None),) * 2
    assert shards.shapes().keys() == {name, "dequantised"}
    expected = shards.read("dequantised", everything)
    np.testing.assert_allclose(shards.read(name, everything), expected, rtol=1e-6)
    part = (slice(3, 21), slice(37, 200))
    np.testing.assert_allclose(shards.read(name, part), expected[part], rtol=1e-6)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=TWO)])
@pytest.mark.parametrize("name", FORMATS)
def test_integers_and_scales_stay(name, devices, made):
    """Every matrix but the head stays in 4 bits, and is that of the dequantised folder."""
    new, whole = made(name)
    placement = make_placement(devices)
    if FORMATS[name].ordered and devices > 1:
        with pytest.raises(UserError, match=r"layers.0.\w+ has its inputs in another order .* tensor_parallel_size=1"):
            load(new, placement=placement)
        return
    found, expected = load(new, placement=placement), load(whole, placement=placement)
    known = parameters(found.config)
    grouped = {where: x for where, x in found.params.items() if isinstance(x, Grouped)}
    assert grouped.keys() == {where for where, p in known.items() if p.kind == "matrix" and not p.head}
    for where, x in expected.params.items():
        np.testing.assert_allclose(dense(found.params[where]), x, rtol=1e-6, atol=1e-7, err_msg=where)
    for x in grouped.values():
        assert x.values[0].nbytes * 2 == x.size
        assert {scale.dtype for scale in x.scale} == {jnp.dtype("float16")}
        assert (x.zeros is not None) == FORMATS[name].zeros
        assert (x.order is not None) == FORMATS[name].ordered


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=TWO)])
def test_a_tensor_may_hold_queries_keys_and_values(devices, tmp_path):
    folder = write_model(tmp_path / "model", layers=1, width=256, head_dim=64, mlp=256)
    tensors = load_file(folder / "model.safetensors")
    for new, old in {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }.items():
        block, merged = new.split(".")
        parts = [tensors.pop(f"model.layers.0.{block}.{name}.weight") for name in old]
        tensors[f"model.layers.0.{block}.{merged}.weight"] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "phi3", "pad_token_id": 0}))
    new, whole = publish(folder, tmp_path / "new", FORMATS["gptq_v2"])
    found, expected = (load(path, placement=make_placement(devices)).params for path in (new, whole))
    assert isinstance(found["layers.0.qkv"], Grouped)
    for where, x in expected.items():
        np.testing.assert_allclose(dense(found[where]), x, rtol=1e-6, atol=1e-7, err_msg=where)


@pytest.mark.parametrize("name", FORMATS)
def test_forms_and_bytes_are_known_from_config_json(name, made, tmp_path):
    new, _ = made(name)
    raw = json.loads((new / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float16"}))
    model, found = resolve(tmp_path), load(new, jnp.bfloat16)
    form = checkpoints.stored_quantization(model.source)
    assert form is not None
    assert form.name == FORMATS[name].form
    orders = sum(x.order.nbytes for x in found.params.values() if isinstance(x, Grouped) and x.order is not None)
    forms = forms_of_checkpoint(model, None)
    assert weight_bytes(model.config, jnp.dtype("bfloat16"), 1, None, forms) + orders == sum(
        leaf.nbytes for leaf in jax.tree.leaves(found.params)
    )


def weights(**args):
    return compressed("pack-quantized", FOUR, **args)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (weights(strategy="group", group_size=48), r"num_bits=4, strategy='group', group_size=48 \(only channel"),
        (weights(strategy="tensor"), "num_bits=4, strategy='tensor'"),
        (compressed("int-quantized", FOUR, "channel"), "num_bits=4 in format='int-quantized'"),
        (compressed("pack-quantized", {"num_bits": 4, "type": "float"}, "group", group_size=32), "num_bits=4"),
        (compressed("pack-quantized", {"num_bits": 3, "type": "int"}, "channel"), "num_bits=3"),
        (AWQ | {"version": "gemv"}, r"version='gemv' \(only gemm is\)"),
        (AWQ | {"bits": 8}, r"bits=8 \(only 4 is\)"),
        (AWQ | {"group_size": 16}, "group_size=16"),
        (gptq(checkpoint_format="marlin"), r"checkpoint_format='marlin' \(only gptq is\)"),
        (gptq(bits="four"), "bits='four'"),
        (gptq(dynamic={"-:.*down.*": {}}), "dynamic, other bits"),
        (gptq(group_size=128.0), "group_size=128.0"),
        (weights(strategy="group", group_size=32.0), "group_size=32.0"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedError, match=f"quantization_config: .*{message}.* is not read: read are"):
        published.parse({"quantization_config": config})


def test_damaged_tensors_are_refused_in_a_line(made, tmp_path):
    new, _ = made("gptq desc_act")
    whole = load_file(new / "model.safetensors")
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())

    def refused(message, **changed):
        tensors = whole | {f"{DOWN}.{key}": value for key, value in changed.items() if value is not None}
        for key, value in changed.items():
            if value is None:
                del tensors[f"{DOWN}.{key}"]
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises((UserError, UnsupportedError), match=message):
            load(tmp_path)

    scales = whole[f"{DOWN}.scales"]
    refused(f"tensor {DOWN}.scales is missing: fetch it again", scales=None)
    refused(f"tensor {DOWN}.qzeros is missing: fetch it again", qzeros=None)
    refused(r"scales has shape \(3, 256\), expected \(4, 256\)", scales=scales[:3])
    refused("scales that are 0 or not finite", scales=scales * np.float16("nan"))
    refused("scales that are 0 or not finite", scales=scales * np.float16(0))
    refused(r"qweight has shape \(.*,\), expected two sizes", qweight=whole[f"{DOWN}.qweight"][0])
    refused(r"qweight has shape \(0, 256\), expected two sizes", qweight=whole[f"{DOWN}.qweight"][:0])
    refused("qweight is stored as F32: I32 is read", qweight=whole[f"{DOWN}.qweight"].astype(np.float32))
    refused("g_idx does not have 64 inputs in each group", g_idx=whole[f"{DOWN}.g_idx"] * 0)
    refused("g_idx does not have 64 inputs in each group", g_idx=whole[f"{DOWN}.g_idx"] % 2)
    refused(r"g_idx has shape \(128,\), expected \(256,\)", g_idx=np.arange(128, dtype=np.int32)[::-1] // 64)
    refused("qzeros is stored as F32: I32 is read", qzeros=whole[f"{DOWN}.qzeros"].astype(np.float32))


@pytest.mark.parametrize(("name", "columns", "where"), [("W4A16_ASYM", 80, "weight_packed"), ("gptq", 160, "qweight")])
def test_a_last_group_with_fewer_inputs_is_refused(name, columns, where, tmp_path):
    kind, x = FORMATS[name], numbers(32, columns)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": kind.config}))
    padded = np.pad(x, ((0, 0), (0, -columns % kind.size)))
    tensors, _ = kind.stored(f"{DOWN}.weight", padded)
    part = {"weight_packed": np.s_[:, : columns // 8], "qweight": np.s_[: columns // 8]}[where]
    tensors[f"{DOWN}.{where}"] = np.ascontiguousarray(tensors[f"{DOWN}.{where}"][part])
    tensors.pop(f"{DOWN}.weight_shape", None)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=f"{columns} inputs, which groups of {kind.size} do not divide"):
        Shards(tmp_path)


@pytest.mark.parametrize(("name", "outputs"), [("W4A16_ASYM", 20), ("W4A16_ASYM", 3)])
def test_words_of_zero_points_may_be_filled_up(name, outputs, tmp_path):
    kind, x = FORMATS[name], numbers(outputs, 64)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": kind.config}))
    padded, expected = kind.stored(f"{DOWN}.weight", np.pad(x, ((0, -outputs % 8), (0, 0)), mode="edge"))
    rows = {key: value if "zero" in key else value[:outputs] for key, value in padded.items()}
    rows[f"{DOWN}.weight_shape"] = np.asarray(x.shape, np.int64)
    save_file({name: np.ascontiguousarray(x) for name, x in rows.items()}, tmp_path / "model.safetensors")
    found = Shards(tmp_path).read(f"{DOWN}.weight", (slice(None),) * 2)
    np.testing.assert_allclose(found, expected[:outputs], rtol=1e-6)


def test_gptq_has_zero_points_up_to_16(made, tmp_path):
    """They are stored less 1, in 4 bits."""
    new, _ = made("gptq desc_act")
    tensors = load_file(new / "model.safetensors")
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    before = Shards(new).grouped(f"{DOWN}.weight")
    tensors[f"{DOWN}.qzeros"][...] = -1  # each of a word's eight is 15
    save_file(tensors, tmp_path / "model.safetensors")
    weight = load(tmp_path).params["layers.0.down"]
    everything = (slice(None),) * 2
    scale = before.factor("scale", 0, everything).astype(np.float32).repeat(64, 1)
    expected = (before.integers(everything).astype(np.float32) - 16) * scale
    np.testing.assert_allclose(np.asarray(dense(weight))[before.order].T, expected, rtol=1e-6)


def test_tensors_of_a_matrix_may_be_in_different_files(made, tmp_path):
    new, _ = made("gptq desc_act")
    tensors = load_file(new / "model.safetensors")
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    shards = {f"model-0000{i + 1}-of-00003.safetensors": list(tensors)[i::3] for i in range(3)}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / shard)
    index = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found, expected = load(tmp_path).params, load(new).params
    np.testing.assert_array_equal(dense(found["layers.0.down"]), dense(expected["layers.0.down"]))


def test_negative_scales_are_read(made, tmp_path):
    """AutoRound writes them."""
    new, _ = made("gptq desc_act")
    tensors = load_file(new / "model.safetensors")
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    before = dense(load(new).params["layers.0.down"])
    tensors[f"{DOWN}.scales"] *= -1
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(dense(load(tmp_path).params["layers.0.down"]), -before)


def test_biases_of_zeros_are_left_out(made, tmp_path):
    """AutoGPTQ once wrote a bias for every matrix. One that is not zero would be lost."""
    new, _ = made("gptq")
    tensors = load_file(new / "model.safetensors")
    (tmp_path / "config.json").write_bytes((new / "config.json").read_bytes())
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    tensors |= {f"{module}.bias": np.zeros(tensors[f"{module}.scales"].shape[1], np.float16) for module in modules}
    save_file(tensors, tmp_path / "model.safetensors")
    found, expected = load(tmp_path).params, load(new).params
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(dense(found["layers.0.down"]), dense(expected["layers.0.down"]))
    tensors[f"{DOWN}.bias"][3] = 1e-4
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"tensor {DOWN}.bias is not part of a llama model"):
        load(tmp_path)

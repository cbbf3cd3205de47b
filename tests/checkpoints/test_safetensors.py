"""Hugging Face folders: where every weight goes, shards, meshes, dtypes, and what is wrong said in one line."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints import copies, safetensors
from jaxspec.parallel.placement import make_placement
from tests.checkpoints import files
from tests.checkpoints.files import assert_same, fails, load, rewrite, shard
from tests.golden.families import FAMILIES, FOLDER
from tests.support.model_folders import write_model


def test_every_weight_lands_where_the_decoder_reads_it():
    config, params = load(FOLDER / "qwen2")
    stored = {k: v.astype(np.float32) for k, v in load_file(FOLDER / "qwen2" / "model.safetensors").items()}
    d, layer = config.head_dim, "model.layers.1."
    for column, x in ((0, params["layers.1.qkv"]), (1, params["layers.1.qkv_bias"])):
        kind = ("weight", "bias")[column]
        q, k, v = (stored[f"{layer}self_attn.{p}_proj.{kind}"].T for p in "qkv")
        groups = np.split(np.asarray(x), config.num_kv_heads, axis=-1)
        for g, group in enumerate(groups):  # two query heads, then the key, then the value
            parts = [q[..., 2 * g * d : 2 * (g + 1) * d], k[..., g * d : (g + 1) * d], v[..., g * d : (g + 1) * d]]
            np.testing.assert_array_equal(group, np.concatenate(parts, axis=-1))
    gate_up = np.asarray(params["layers.1.gate_up"])
    blocks = gate_up.reshape(config.width, -1, 2, config.layers[1].mlp_block)
    assert blocks.shape[1] > 1  # else their order would not show
    for part, name in enumerate(("gate", "up")):
        columns = blocks[:, :, part].reshape(config.width, config.mlp_width)
        np.testing.assert_array_equal(columns, stored[f"{layer}mlp.{name}_proj.weight"].T)
    np.testing.assert_array_equal(params["layers.1.out"], stored[f"{layer}self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])


def test_gemma_norms_are_one_plus_w_in_float32():
    config, params = load(FOLDER / "gemma3", "bfloat16")
    stored = load_file(FOLDER / "gemma3" / "model.safetensors")["model.layers.0.self_attn.q_norm.weight"]
    assert config.norm_plus_one
    assert params["layers.0.q_norm"].dtype == jnp.float32
    np.testing.assert_array_equal(params["layers.0.q_norm"], stored.astype(np.float32) + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_on_two_devices_hold_the_same_weights(family, tmp_path):
    devices = 1 if family in ("gemma3", "gemma4_dense") else 2  # these have a layer with one key-value head
    _, whole = load(FOLDER / family)
    _, parts = load(shard(tmp_path, family), devices=devices)
    assert_same(parts, whole)
    if devices == 2:
        for name in ("layers.0.qkv", "layers.0.gate_up", "layers.0.down", "layers.0.out", "embed"):
            shards = parts[name].addressable_shards
            assert len({s.device for s in shards}) == 2
            assert all(s.data.size * 2 == parts[name].size for s in shards), name


@pytest.mark.parametrize("devices", [1, 2, "2 of 4"])
def test_every_byte_is_read_once(devices, monkeypatch):
    """Also where a model is sharded over one axis of the mesh only, and pairs of devices hold the same part."""
    if devices == "2 of 4":
        monkeypatch.setattr(files, "make_placement", lambda _: make_placement(4, draft_size=2).draft)
    read, sizes = safetensors.Shards.read, []
    monkeypatch.setattr(safetensors.Shards, "read", lambda *args: sizes.append((x := read(*args)).nbytes) or x)
    load(FOLDER / "llama2", devices=devices)
    assert sum(sizes) == sum(x.nbytes for x in load_file(FOLDER / "llama2" / "model.safetensors").values())


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_stored_dtypes_become_the_wanted_one(stored, wanted, tmp_path):
    folder = rewrite(tmp_path, "llama2", lambda t: {k: v.astype(jnp.dtype(stored)) for k, v in t.items()})
    _, params = load(folder, wanted)
    expected = load_file(folder / "model.safetensors")["lm_head.weight"].astype(jnp.dtype(wanted)).T
    assert params["head"].dtype == jnp.dtype(wanted)
    np.testing.assert_array_equal(np.asarray(params["head"], np.float32), expected.astype(np.float32))
    assert safetensors.stored_dtype(folder) == stored


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama2", "llama3"])  # whose frequencies have factors
def test_rotary_frequencies_of_a_file(family, stored, tmp_path):
    """Older files have them, rounded, with the factors or without."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    config, expected = load(FOLDER / family)
    plain = config.rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    for wanted in (plain, plain / np.asarray(config.rope.factors or 1.0)):
        found = load(rewrite(tmp_path, family, lambda t, x=wanted: t | {name: x.astype(jnp.dtype(stored))}))
        assert_same(found[1], expected)
    for wrong in (np.float32(plain * 1.03), np.float32(plain[:-1]), plain.astype(np.int32)):
        with fails(ValueError, f"tensor {name} holds other rotary frequencies", "rope_theta"):
            load(rewrite(tmp_path, family, lambda t, x=wrong: t | {name: x}))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_repeated_head_of_a_tied_model(stored, tmp_path):
    repeated = lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].astype(jnp.dtype(stored))}
    _, params = load(rewrite(tmp_path, "qwen2", repeated))
    assert "head" not in params


@pytest.mark.parametrize("row", [None, *range(0, 320, 53)])
def test_a_head_that_is_not_the_table_is_refused(row, tmp_path, monkeypatch):
    """In a tied model it would be taken by some versions of transformers, and not by others. One number is enough."""
    monkeypatch.setattr(copies, "PIECE", 4 * 32 * 7)  # some rows at a time, the last fewer
    folder = write_model(tmp_path, layers=1)
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    load(folder)
    if row is None:
        head = head[:2]
    else:
        head[row, row % 32] *= np.float32(1.001)
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    words = "tie_word_embeddings is true", "lm_head.weight differs from model.embed_tokens.weight", "set it to false"
    with fails(NotImplementedError, *words):
        load(folder)


def test_a_missing_tensor_is_named(tmp_path):
    folder = rewrite(tmp_path, "llama2", lambda t: t.pop("model.layers.1.mlp.up_proj.weight") is None or t)
    with fails(ValueError, str(folder), "model.layers.1.mlp.up_proj.weight", "missing"):
        load(folder)


def test_an_extra_tensor_is_named(tmp_path):
    folder = rewrite(tmp_path, "llama2", lambda t: t | {"model.layers.7.adapter.weight": np.ones((2, 2), np.float32)})
    with fails(ValueError, "model.layers.7.adapter.weight", "not part"):
        load(folder)


def test_a_wrong_shape_is_named(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    with fails(ValueError, name, "(48, 7)", "(48, 80)"):
        load(rewrite(tmp_path, "llama2", lambda t: t | {name: np.ones((48, 7), np.float32)}))


def test_a_truncated_file_is_named(tmp_path):
    path = rewrite(tmp_path, "llama2") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with fails(ValueError, str(path), "truncated"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    shard(tmp_path, "llama2")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with fails(FileNotFoundError, "model-00002-of-00003.safetensors", "index"):
        load(tmp_path)


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    name = "model.norm.weight"
    with fails(NotImplementedError, name, "int32"):
        load(rewrite(tmp_path, "llama2", lambda t: t | {name: np.ones(48, np.int32)}))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"vision_config": {}}, "multimodal"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "mrope_section"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_unsupported_checkpoints_are_refused(change, word, tmp_path):
    with fails(NotImplementedError, word):
        load(rewrite(tmp_path, "llama2", **change))


def test_folders_without_their_files(tmp_path):
    source = checkpoints.resolve(str(rewrite(tmp_path, "llama2")))
    with fails(FileNotFoundError, str(tmp_path), "tokenizer.json"):
        checkpoints.load_tokenizer(source)
    (tmp_path / "model.safetensors").unlink()
    with fails(FileNotFoundError, str(tmp_path), ".safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with fails(ValueError, "config.json", "JSON"):
        checkpoints.load_config(source)


def test_a_mesh_that_cuts_a_head_is_refused():
    with fails(ValueError, "cuts through a group of"):
        load(FOLDER / "gemma3", devices=2)


@pytest.mark.parametrize("missing", [True, False])
def test_a_whole_file_beside_an_index(missing, tmp_path):
    """Is what transformers takes, whether or not the shards that the index names are there."""
    folder = rewrite(shard(tmp_path, "llama2"), "llama2", lambda t: {name: x + 1 for name, x in t.items()})
    for path in folder.glob("model-*.safetensors") if missing else ():
        path.unlink()
    _, params = load(folder)
    np.testing.assert_array_equal(params["embed"], load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_consolidated_copies_are_not_read(tmp_path):
    folder = rewrite(tmp_path, "llama2")
    save_file({"stray": np.ones(3, np.float32)}, folder / "consolidated.safetensors")
    load(folder)

"""Damaged and absurd folders, tokenizers and names that are none: one line that says which, and no code is run."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoints
from checkpoints import orbax, reading, safetensors
from tests import tiny_models
from tests.checkpoints.files import fails, load, rewrite, shard, write_gguf
from tests.golden.families import FOLDER
from tests.model_folders import write_tokenizer

NAN, INF = float("nan"), float("inf")
NESTED = '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"


class Tokenizer:
    eos_token_id = 9


def hf(folder: Path) -> checkpoints.Source:
    return checkpoints.Source("hf", folder, folder.name)


# config.json


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, ("num_hidden_layers=0", "1..1000")),
        ({"num_hidden_layers": 10**8}, ("num_hidden_layers=100000000",)),
        ({"num_hidden_layers": 2.5}, ("num_hidden_layers=2.5", "whole")),
        ({"num_hidden_layers": "2"}, ("num_hidden_layers='2'",)),
        ({"num_hidden_layers": True}, ("num_hidden_layers=True",)),
        ({"num_hidden_layers": None}, ("num_hidden_layers",)),
        ({"num_attention_heads": 0}, ("num_attention_heads=0",)),
        ({"num_attention_heads": -4}, ("num_attention_heads=-4",)),
        ({"num_key_value_heads": 0}, ("num_key_value_heads=0",)),
        ({"head_dim": 0}, ("head_dim=0",)),
        ({"hidden_size": 2, "head_dim": None}, ("hidden size (2)",)),
        ({"hidden_size": NAN}, ("hidden_size=nan",)),
        ({"vocab_size": 2**31}, ("vocab_size=2147483648",)),
        ({"rms_norm_eps": NAN}, ("rms_norm_eps=nan",)),
        ({"rms_norm_eps": -1.0}, ("rms_norm_eps=-1.0",)),
        ({"rms_norm_eps": "1e-5"}, ("rms_norm_eps='1e-5'",)),
        ({"max_position_embeddings": 10**400}, ("max_position_embeddings=1000",)),
        ({"eos_token_id": 2**31}, ("eos_token_id=2147483648",)),
        ({"eos_token_id": [2, -1]}, ("eos_token_id=-1",)),
        ({"eos_token_id": "2"}, ("eos_token_id='2'",)),
        ({"eos_token_id": 2.5}, ("eos_token_id=2.5",)),
        ({"eos_token_id": {"a": 1}}, ("eos_token_id={'a': 1}",)),
        ({"model_type": ["llama"]}, ("model_type=['llama']",)),
        ({"rope_parameters": [1]}, ("rope_parameters=[1]", "object")),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ("rope_theta=0",)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": INF}}, ("rope_theta=inf",)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ("factor",)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, ("factor=0",)),
        ({"rope_parameters": {"full_attention": 5, "sliding_attention": {}}}, ("object",)),
        ({"layer_types": 5}, ("layer_types",)),
        ({"hidden_act": 3}, ("hidden_act",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings",)),
    ],
)
def test_a_config_with_absurd_values(change, words, tmp_path):
    with fails(ValueError, str(tmp_path / "config.json"), "again", *words):
        checkpoints.load_config(hf(rewrite(tmp_path, "llama2", **change)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5",)),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}, ("partial",)),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, ("longrope",)),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": 5}}, ("rope type 5",)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, ("dynamic",)),
        ({"mlp_bias": True}, ("mlp_bias=True",)),
        ({"is_causal": False}, ("is_causal=False",)),
        ({"residual_multiplier": 0.2}, ("residual_multiplier=0.2",)),
        ({"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping=50.0",)),
        ({"final_logit_softcapping": 30.0}, ("final_logit_softcapping=30.0",)),
        ({"query_pre_attn_scalar": 64}, ("query_pre_attn_scalar=64",)),
        ({"compression_config": {"bits": 4}}, ("compression_config",)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}, ("layer_types",)),
    ],
)
def test_a_config_with_options_that_would_be_ignored(change, words, tmp_path):
    with fails(NotImplementedError, *words):
        checkpoints.load_config(hf(rewrite(tmp_path, "llama2", **change)))


def test_labels_are_not_made(tmp_path):
    """transformers would make a list of them."""
    checkpoints.load_config(hf(rewrite(tmp_path, "llama2", num_labels=10**9, id2label=4)))


NOT_OBJECTS = ["[]", "5", '"x"', "null", "", "{", NESTED, "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe\x00"]


@pytest.mark.parametrize("name", ["config.json", safetensors.INDEX, "generation_config.json", orbax.CONFIG_FILE])
@pytest.mark.parametrize("text", NOT_OBJECTS, ids=range(len(NOT_OBJECTS)))
def test_json_that_is_no_object(name, text, tmp_path):
    folder = shard(tmp_path, "llama2")
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    source = checkpoints.resolve(str(folder))
    with fails(ValueError, str(folder / name), "again"):
        checkpoints.load_config(source)
        checkpoints.load_stop_ids(source, Tokenizer)
        safetensors.files_of(folder)


def test_json_of_any_size_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_JSON", 100)
    with fails(ValueError, "config.json", "more than 100"):
        checkpoints.load_config(hf(rewrite(tmp_path, "llama2")))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    (rewrite(tmp_path, "llama2") / "config.json").chmod(0)
    with fails(PermissionError, "config.json"):
        checkpoints.load_config(hf(tmp_path))


# Stop ids


@pytest.mark.parametrize("ids", [2**31, -1, "7", 2.5, True, [3, None], {"a": 1}, [[1]]], ids=str)
def test_a_generation_config_with_absurd_ids(ids, tmp_path):
    source = hf(rewrite(tmp_path, "llama2"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with fails(ValueError, str(tmp_path / "generation_config.json"), "eos_token_id=", "0..2147483647"):
        checkpoints.load_stop_ids(source, Tokenizer)


def test_an_id_of_zero_is_one(tmp_path):
    source = hf(rewrite(tmp_path, "llama2"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert checkpoints.load_stop_ids(source, Tokenizer) == (0, 9)


def test_a_tokenizer_with_an_absurd_id(tmp_path):
    class Absurd:
        eos_token_id = 2**31

    with fails(ValueError, str(tmp_path), "eos_token_id=2147483648"):
        checkpoints.load_stop_ids(hf(rewrite(tmp_path, "llama2")), Absurd)


# Shards


def write_index(folder: Path, raw) -> Path:
    (folder / safetensors.INDEX).write_text(json.dumps(raw))
    return folder


OUTSIDE = ["../model.safetensors", "/etc/model.safetensors", "..", "a/b.safetensors", "a\\b.safetensors"]
NO_SHARDS = ["", 5, None, ["x"], "x\0.safetensors", "config.json", "x.safetensors/"]


@pytest.mark.parametrize("name", OUTSIDE + NO_SHARDS, ids=str)
def test_shards_stay_in_their_folder(name, tmp_path):
    rewrite(tmp_path, "llama2")  # what ../model.safetensors leads to
    inside = shard(tmp_path / "inside", "llama2")
    raw = json.loads((inside / safetensors.INDEX).read_text())
    raw["weight_map"]["lm_head.weight"] = name
    with fails(ValueError, str(inside / safetensors.INDEX), repr(name), "same folder"):
        load(write_index(inside, raw))


@pytest.mark.parametrize("raw", [{}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": 5}])
def test_an_index_without_its_map(raw, tmp_path):
    with fails(ValueError, safetensors.INDEX, "weight_map"):
        load(write_index(shard(tmp_path, "llama2"), raw))


def test_the_hubs_links_are_followed(tmp_path):
    """Its cache's snapshots are links to files elsewhere."""
    blobs, snapshot = shard(tmp_path / "blobs", "llama2"), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    load(snapshot)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"\xff" * 64,
    ],
    ids=range(7),
)
def test_a_damaged_safetensors_file(data, tmp_path):
    (rewrite(tmp_path, "llama2") / "model.safetensors").write_bytes(data)
    with fails(ValueError, str(tmp_path)):
        load(tmp_path)
    with fails(ValueError, str(tmp_path)):
        safetensors.stored_dtype(tmp_path)


def test_a_safetensors_file_that_is_a_folder(tmp_path):
    rewrite(tmp_path, "llama2")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with fails(OSError, "model.safetensors"):
        load(tmp_path)


# Tokenizers


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "5", '"x"', "", "{", "[" * 100_000, '{"eos_token": 5}'])
def test_a_damaged_tokenizer(name, text, tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    with fails(ValueError, str(tmp_path)):
        checkpoints.load_tokenizer(hf(tmp_path))


def test_a_class_of_tokenizer_that_does_not_exist(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with fails((ValueError, OSError), str(tmp_path)):
        checkpoints.load_tokenizer(hf(tmp_path))


EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Tokenizer: pass\n"


def test_no_checkpoints_code_is_run_nor_asked_about(tmp_path):
    """In a process of its own, whose input says yes to everything."""
    write_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"], "AutoConfig": "evil.Tokenizer"}
    settings = {"tokenizer_class": "EvilTokenizer", "auto_map": auto_map}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    rewrite(tmp_path, "llama2", auto_map=auto_map)
    code = (
        f"import checkpoints; source = checkpoints.resolve({str(tmp_path)!r})\n"
        "print(checkpoints.load_config(source).family)\n"
        "try: checkpoints.load_tokenizer(source)\n"
        "except NotImplementedError as error: print(error)\n"
        "print(input())"
    )
    run = subprocess.run([sys.executable, "-c", code], input="y\n", capture_output=True, text=True, timeout=120)
    family, refusal, left = run.stdout.splitlines()
    assert (family, left) == ("llama", "y"), run.stderr
    assert str(tmp_path) in refusal
    assert "code of its own, which jaxspec does not run" in refusal
    assert not (tmp_path / "ran").exists()


# orbax folders


ABSURD = (
    *({"rope": 5}, {"rope": None}, {"rope": {"theta": 1e4, "factors": 3}}, {"rope": {"theta": "x", "factors": []}}),
    *({"windows": None}, {"windows": [0, 0]}, {"windows": ["x", None]}, {"eos_ids": 2}, {"eos_ids": [2**31]}),
    *({"num_heads": 0}, {"num_layers": 10**8}, {"tied": 1}, {"activation": "relu"}, {"family": ["llama"]}),
    *({"norm_eps": NAN}, {"query_scale": -1.0}, {"local_rope": []}, {"embed_width": 0}, {"head_dim": None}),
)


@pytest.mark.parametrize("change", ABSURD, ids=str)
def test_a_jaxspec_json_with_absurd_values(change, tmp_path):
    path = tmp_path / orbax.CONFIG_FILE
    path.write_text(json.dumps(tiny_models.BASE.to_json() | change))
    kind = NotImplementedError if "family" in change else ValueError
    with fails(kind, str(path)):
        checkpoints.load_config(checkpoints.resolve(str(tmp_path)))


def test_damaged_arrays(tmp_path):
    config, params = load(FOLDER / "llama2")
    checkpoints.save(tmp_path / "ckpt", params, config)
    for path in (tmp_path / "ckpt" / orbax.PARAMS).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    with fails((ValueError, OSError), str(tmp_path / "ckpt" / orbax.PARAMS)):
        load(tmp_path / "ckpt")


@pytest.mark.parametrize("data", [b"\xff\xff", b"", b"two\nlines"])
def test_a_damaged_fingerprint(data, tmp_path):
    (tmp_path / orbax.FINGERPRINT).write_bytes(data)
    with fails(ValueError, orbax.FINGERPRINT):
        checkpoints.load_fingerprint(checkpoints.Source("orbax", tmp_path, "draft"))


# Names


@pytest.mark.parametrize("model", [5, None, True, b"x", ["a"], "", "  ", "a\0b", "/a\nb", "x" * 5000], ids=repr)
def test_names_of_models_that_are_none(model):
    with fails(ValueError, "model=", "1..4096"):
        checkpoints.resolve(model)


@pytest.mark.parametrize("revision", [5, "", "a\nb", ["main"]], ids=repr)
def test_revisions_that_are_none(revision):
    with fails(ValueError, "revision=", "1..4096"):
        checkpoints.resolve("org/model", revision)


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    with fails(ValueError, "x.gguf", "no checkpoint"):
        checkpoints.resolve(str(tmp_path / "x.gguf"))
    with fails(FileNotFoundError, "~no-such-user/x"):
        checkpoints.resolve("~no-such-user/x")
    with fails(ValueError, "'org/..'", "no hub id"):
        checkpoints.resolve("org/..")
    with fails(OSError, "too long"):
        checkpoints.resolve("x" * 300 + "/y")
    assert checkpoints.resolve(write_gguf(tmp_path / "m.gguf", "llama2")).name == "m"  # a Path is a name too


def test_errors_of_the_library_that_fetches(monkeypatch):
    import huggingface_hub

    def break_off(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", break_off)
    with fails(ConnectionError, "org/model", "give the folder's path"):
        checkpoints.resolve("org/model")

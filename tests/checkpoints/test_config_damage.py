"""Damaged and absurd config.json, generation_config.json and other JSON of a folder: one line that says which."""

from __future__ import annotations

import json
import os

import pytest

import checkpoints
from checkpoints import orbax, reading, safetensors
from tests.checkpoints.files import fails, hf, rewrite, shard

NAN, INF = float("nan"), float("inf")
NESTED = '{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"


class Tokenizer:
    eos_token_id = 9


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
    source = hf(rewrite(tmp_path, "llama2", eos_token_id=None))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert checkpoints.load_stop_ids(source, Tokenizer) == (0, 9)


def test_a_tokenizer_with_an_absurd_id(tmp_path):
    class Absurd:
        eos_token_id = 2**31

    with fails(ValueError, str(tmp_path), "eos_token_id=2147483648"):
        checkpoints.load_stop_ids(hf(rewrite(tmp_path, "llama2")), Absurd)

"""GGUF files of Gemma 4, written with the tables of the gguf package, give what the Hugging Face folder gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, trainers

import checkpoints
from tests.checkpoints.files import assert_same, fails, finish, load
from tests.golden.families import FAMILIES, FOLDER, SHARED

GOLDEN = ("gemma4", "gemma4_dense")
TEXTS = ("the cat  sat\n\non a mat", "<|turn>user\nnaïve 你好 ½<turn|>", " ")


def tensors_of(family: str) -> dict[str, np.ndarray]:
    """Return the golden model's tensors under the gguf package's names, and the factors of its rotary embedding."""
    raw = SHARED | FAMILIES[family][1]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, raw["num_hidden_layers"])
    found = {}
    for name, x in load_file(FOLDER / family / "model.safetensors").items():
        own = names.get_name(name.removesuffix(".weight"))
        assert own is not None, name
        found[f"{own}.weight"] = x.astype(np.float32)
    used = int(raw["global_head_dim"] * raw["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.full(raw["global_head_dim"] // 2, 1e30, np.float32)
    factors[:used] = 1
    return found | {"rope_freqs.weight": factors}


def metadata_of(family: str) -> dict[str, Any]:
    """Return the golden model's metadata as llama.cpp's converter writes them, by their names in the gguf package."""
    raw = SHARED | FAMILIES[family][1]
    keys, count = gguf.Keys, raw["num_hidden_layers"]
    sliding = [kind == "sliding_attention" for kind in raw["layer_types"]]
    shared, few = raw.get("num_kv_shared_layers", 0), raw.get("num_global_key_value_heads")
    wide = [raw["intermediate_size"] * (2 if i >= count - shared else 1) for i in range(count)]
    heads = [raw["num_key_value_heads"] if window else few for window in sliding]
    ropes = raw["rope_parameters"]
    return {
        keys.LLM.BLOCK_COUNT: count,
        keys.LLM.CONTEXT_LENGTH: raw["max_position_embeddings"],
        keys.LLM.EMBEDDING_LENGTH: raw["hidden_size"],
        keys.LLM.EMBD_LENGTH_PER_LAYER_INP: raw["hidden_size_per_layer_input"],
        keys.LLM.FEED_FORWARD_LENGTH: wide if raw.get("use_double_wide_mlp") else raw["intermediate_size"],
        keys.LLM.FINAL_LOGIT_SOFTCAPPING: raw["final_logit_softcapping"],
        keys.Attention.HEAD_COUNT: raw["num_attention_heads"],
        keys.Attention.HEAD_COUNT_KV: heads if few else raw["num_key_value_heads"],
        keys.Attention.LAYERNORM_RMS_EPS: raw["rms_norm_eps"],
        keys.Attention.SLIDING_WINDOW: raw["sliding_window"],
        keys.Attention.SLIDING_WINDOW_PATTERN: sliding,
        keys.Attention.SHARED_KV_LAYERS: shared,
        keys.Attention.KEY_LENGTH: raw["global_head_dim"],
        keys.Attention.VALUE_LENGTH: raw["global_head_dim"],
        keys.Attention.KEY_LENGTH_SWA: raw["head_dim"],
        keys.Attention.VALUE_LENGTH_SWA: raw["head_dim"],
        keys.Rope.DIMENSION_COUNT: raw["global_head_dim"],
        keys.Rope.DIMENSION_COUNT_SWA: raw["head_dim"],
        keys.Rope.FREQ_BASE: ropes["full_attention"]["rope_theta"],
        keys.Rope.FREQ_BASE_SWA: ropes["sliding_attention"]["rope_theta"],
        keys.Tokenizer.BOS_ID: 1,
        keys.Tokenizer.EOS_ID: 2,
    }


def write(path: Path, family: str, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Write a GGUF file of a golden model. changes: further metadata, None to leave a key out."""
    writer = gguf.GGUFWriter(path, "gemma4")
    named = {key.format(arch="gemma4"): value for key, value in metadata_of(family).items()}
    for key, value in (named | {key.replace("__", "."): value for key, value in changes.items()}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, x in (tensors_of(family) if tensors is None else tensors).items():
        writer.add_tensor(name, x)
    finish(writer)
    return path


@pytest.mark.parametrize("family", GOLDEN)
def test_a_file_equals_the_folder(family, tmp_path):
    (ours, params), (theirs, expected) = load(write(tmp_path / "m.gguf", family)), load(FOLDER / family)
    assert_same(params, expected, atol=0)
    assert ours == dataclasses.replace(theirs, norm_eps=ours.norm_eps)
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"gemma4__expert_count": 8}, NotImplementedError, ("gemma4.expert_count=8",)),
        ({"gemma4__feed_forward_length": [32] * 5}, ValueError, ("feed_forward_length", "5 values for 6 layers")),
        ({"gemma4__feed_forward_length": [32] * 5 + [48]}, NotImplementedError, ("feed_forward_length",)),
        ({"gemma4__attention__sliding_window_pattern": [True]}, ValueError, ("1 values for 6 layers",)),
        (
            {"gemma4__attention__shared_kv_layers": 6, "gemma4__feed_forward_length": 32},
            ValueError,
            ("no earlier layer",),
        ),
        ({"gemma4__attention__key_length_swa": None}, ValueError, ("lacks gemma4.attention.key_length_swa",)),
        ({"gemma4__attention__value_length": 16}, NotImplementedError, ("value_length=16", "32")),
        ({"gemma4__rope__dimension_count_swa": 8}, NotImplementedError, ("dimension_count_swa=8",)),
    ],
)
def test_metadata_that_are_not_supported(changes, kind, words, tmp_path):
    path = write(tmp_path / "m.gguf", "gemma4", **changes)
    with fails(kind, str(path), *words):
        load(path)


@pytest.mark.parametrize(
    ("factors", "kind"), [([1.0] * 3, ValueError), ([1.0, 8.0] * 8, NotImplementedError), (None, ValueError)]
)
def test_rotary_factors_that_are_not_supported(factors, kind, tmp_path):
    tensors = {name: x for name, x in tensors_of("gemma4").items() if name != "rope_freqs.weight"}
    if factors:
        tensors["rope_freqs.weight"] = np.float32(factors)
    path = write(tmp_path / "m.gguf", "gemma4", tensors)
    with fails(kind, str(path), "rope_freqs.weight"):
        load(path)


def tokenizer_meta() -> dict[str, Any]:
    """Return the metadata of a small vocabulary as Gemma 4's files have it."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=64, show_progress=False)
    trained.train_from_iterator([TEXTS[0].replace(" ", "▁"), "user\nnaïve▁你好"] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    types = [3] * 3 + [2] + [3] * 2 + [6] * 256 + [1] * len(model["vocab"])
    return {
        "tokenizer__ggml__model": "gemma4",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": types,
        "tokenizer__ggml__scores": [0.0] * len(tokens),
        "tokenizer__ggml__merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer__ggml__add_space_prefix": False,
        "tokenizer__ggml__add_bos_token": True,
        "tokenizer__ggml__padding_token_id": 0,
        "tokenizer__ggml__eos_token_id": 1,
        "tokenizer__ggml__bos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 3,
    }


def test_a_tokenizer_equals_that_of_transformers(tmp_path):
    from transformers import GemmaTokenizer

    meta = tokenizer_meta()
    ours = checkpoints.load_tokenizer(checkpoints.resolve(str(write(tmp_path / "m.gguf", "gemma4", **meta))))
    vocab = {token: i for i, token in enumerate(meta["tokenizer__ggml__tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer__ggml__merges"]]
    theirs = GemmaTokenizer(vocab=vocab, merges=merges, additional_special_tokens=["<|turn>", "<turn|>"])
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids[0] == 2
        assert ids[1:] == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids[1:]) == text


def test_a_tokenizer_without_merges_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", "gemma4", **tokenizer_meta() | {"tokenizer__ggml__merges": None})
    with fails(ValueError, str(path), "tokenizer.ggml.merges"):
        checkpoints.load_tokenizer(checkpoints.resolve(str(path)))


def test_a_call_of_tools_ends_an_output(tmp_path):
    """Files name the ends of texts and turns; the model writes another token after its calls."""
    meta = tokenizer_meta()
    meta["tokenizer__ggml__tokens"] = [*meta["tokenizer__ggml__tokens"], "<|tool_response>"]
    meta["tokenizer__ggml__token_type"] = [*meta["tokenizer__ggml__token_type"], 3]
    meta["tokenizer__ggml__scores"] = [0.0] * len(meta["tokenizer__ggml__tokens"])
    ends = checkpoints.load_ends(checkpoints.resolve(str(write(tmp_path / "m.gguf", "gemma4", **meta))))
    assert ends[len(meta["tokenizer__ggml__tokens"]) - 1] == ("model family",)
    assert 1 in ends

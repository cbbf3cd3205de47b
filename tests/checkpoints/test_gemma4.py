"""Gemma 4's configurations and tensors as they are published."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from checkpoints import hf_config, names
from checkpoints.assemble import stored_shape
from checkpoints.safetensors import parse
from jaxspec.models.decoder import parameters
from jaxspec.models.rope import Rope
from tests.checkpoints.files import fails
from tests.golden.families import FOLDER

SHARED = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
# The published options, without those that are the defaults of transformers.
PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": SHARED
    | {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "E4B": SHARED
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
    "31B": SHARED
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    },
}


def test_e2b():
    config = parse(PUBLISHED["E2B"])
    assert [layer.shares for layer in config.layers[:15]] == [None] * 15
    assert {layer.shares for layer in config.layers[15:]} == {13, 14}  # the last of each kind
    for layer in config.layers:
        full = layer.window is None
        assert (layer.head_dim, layer.window) == ((512, None) if full else (256, 512))
        assert layer.rope == (Rope(1e6, rotated=64) if full else Rope(1e4))
        assert layer.mlp_width == (12288 if layer.shares is not None else 6144)
        assert layer.query_scale == 1.0
    frequencies = config.layers[4].rope.frequencies(512)
    np.testing.assert_allclose(frequencies[:64], 1e6 ** -(np.arange(64) / 256))  # by the whole head, not its part
    assert len(frequencies) == 256
    assert not frequencies[64:].any()


def test_31b():
    layers = parse(PUBLISHED["31B"]).layers
    assert {(own.num_kv_heads, own.value_is_key) for own in layers if own.window is None} == {(4, True)}
    assert {(own.num_kv_heads, own.value_is_key) for own in layers if own.window} == {(16, False)}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"enable_moe_block": True}, NotImplementedError, "26B-A4B"),
        ({"use_bidirectional_attention": "all"}, NotImplementedError, "use_bidirectional_attention='all'"),
        ({"vocab_size_per_layer_input": 99}, NotImplementedError, "vocab_size_per_layer_input=99"),
        ({"num_kv_shared_layers": 35}, ValueError, "no earlier layer"),
        ({"num_kv_shared_layers": 31}, ValueError, "no earlier layer has full_attention"),
        ({"per_layer_config": {"3": {"sliding_window": 7}}}, ValueError, "per_layer_config"),
        ({"per_layer_config": {"3": {"head_dim": "x"}}}, ValueError, "head_dim='x'"),
        ({"per_layer_config": {"three": {"head_dim": 8}}}, ValueError, "numbers of layers"),
    ],
    ids=str,
)
def test_what_is_refused(change, kind, words):
    with fails(kind, words):
        hf_config.model_config(json.loads((FOLDER / "gemma4" / "config.json").read_text()) | PUBLISHED["E2B"] | change)


def test_unused_keys_and_values_of_layers_that_share():
    """Published checkpoints hold them."""
    table = names.hf_of(parse(PUBLISHED["E2B"]))
    spare = [f"model.layers.20.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    assert table.unknown(spare, ()) == []
    assert table.unknown([spare[0].replace("20", "2")], ()) != []


@pytest.mark.thorough
@pytest.mark.oracle
@pytest.mark.parametrize("size", PUBLISHED)
def test_names_and_shapes_are_those_of_transformers(size):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**PUBLISHED[size]))
    theirs = {name: tuple(x.shape) for name, x in model.state_dict().items() if name != "lm_head.weight"}
    config = parse(PUBLISHED[size])
    table, ours = names.hf_of(config), {}
    for where, parameter in parameters(config, "bfloat16").items():
        for part, name in table.sources(where).items():
            assert ours.setdefault(name, stored_shape(parameter, part)) == stored_shape(parameter, part)
    assert ours == theirs

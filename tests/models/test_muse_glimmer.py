"""Muse Glimmer: its tokens over several devices, and its configurations."""

from __future__ import annotations

import json

import pytest

from checkpoints.hf_config import model_config
from checkpoints.safetensors import parse
from jaxspec.models.rope import NO_ROPE
from tests.checkpoints.files import fails
from tests.golden.families import FOLDER, torch_model
from tests.models.greedy import greedy_tokens

RAW = json.loads((FOLDER / "muse_glimmer" / "config.json").read_text(encoding="utf-8"))


def test_every_fourth_layer_from_the_last_sees_all_and_is_not_rotated():
    text = {key: value for key, value in RAW["text_config"].items() if key not in ("layer_types", "layer_rope_theta")}
    config = parse(RAW | {"text_config": text | {"num_hidden_layers": 9}})
    assert [layer.window for layer in config.layers] == [None, 12, 12, 12] * 2 + [None]
    assert [layer.rope == NO_ROPE for layer in config.layers] == [True, False, False, False] * 2 + [True]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"layer_rope_theta": [0, 500.0, 400.0, 500.0, 0]}, NotImplementedError, "400.0: only 0 and 500"),
        ({"layer_rope_theta": [0, 500.0]}, ValueError, "each of 5 layers"),
        ({"layer_rope_theta": [0, 500.0, "x", 0, 0]}, ValueError, "list of numbers"),
        ({"qk_scale_factor": 0}, ValueError, "qk_scale_factor=0"),
        ({"post_norm_eps": -1}, ValueError, "post_norm_eps=-1"),
    ],
    ids=str,
)
def test_what_is_refused(change, kind, words):
    with fails(kind, words):
        model_config(RAW["text_config"] | change)


@pytest.mark.thorough
@pytest.mark.oracle
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_greedy_tokens_are_those_of_transformers(devices, tmp_path):
    """Over 200 tokens, many times the window. Over more devices than key-value heads, these are copied."""
    pytest.importorskip("torch")
    model = torch_model("muse_glimmer", 0, num_attention_heads=8)  # so that 8 devices have one each
    ours, theirs = greedy_tokens("muse_glimmer", model, devices, tmp_path)
    assert ours == theirs

"""Muse Glimmer: its tokens over several devices, and its configurations."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import checkpoints
from checkpoints.hf_config import model_config
from checkpoints.safetensors import parse
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.rope import NO_ROPE
from jaxspec.models.sharding import for_degree
from jaxspec.parallel.placement import make_placement
from tests.checkpoints.files import fails
from tests.golden.families import FOLDER, SHARED, save_model, torch_model
from tests.support import tiny_models
from tests.support.lively_models import params

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
    torch = pytest.importorskip("torch")
    model = torch_model("muse_glimmer", 0, num_attention_heads=8)  # so that 8 devices have one each
    save_model(model, "muse_glimmer", tmp_path)
    source = checkpoints.resolve(str(tmp_path))
    config = for_degree(checkpoints.load_config(source), devices)
    weights = checkpoints.load_params(source, config, abstract_params(config, "float32", make_placement(devices)))
    prompt = np.random.default_rng(5).integers(3, SHARED["vocab_size"], (1, 9))
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(torch.from_numpy(prompt), **options)[0, 9:].tolist()
    one = Model(dataclasses.replace(config, max_model_len=256), weights)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    sizes = {"max_num_seqs": 2, "num_pages": 40, "max_model_len": 256, "tensor_parallel_size": devices}
    ours = tiny_models.outputs(tiny_models.engine(one, speculative, **sizes), prompt.tolist(), params(200)[0])
    assert ours[0] == theirs

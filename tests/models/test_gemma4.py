"""Gemma 4 in engines that speculate, reuse prefixes and shard: its layers differ in heads, and share their keys."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.models.paged import cache_layout
from tests.golden.families import torch_model
from tests.models.greedy import greedy_tokens
from tests.support.lively_models import PROMPTS, engine, new_engine, params, plain, serve, target, texts

GREEDY = tuple(params((20,) * 5))


def test_only_layers_with_keys_and_values_of_their_own_have_pages():
    layout = cache_layout(target("gemma4").config, page_size=4, num_pages=3, dtype="float32", platform="cpu")
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layout.layers] == [(2, 16), (2, 32)]


@pytest.mark.thorough
def test_a_reused_prefix_changes_no_token():
    """Also longer than a window, four times over, and where a longer prompt goes on from it."""
    long = tuple(np.random.default_rng(3).integers(0, 64, 40).tolist())
    one, sampling = engine("first_layer", 2, "gemma4"), params(9)
    first = texts(serve(one, [long], sampling))[0]
    assert first == plain((long,), tuple(sampling), "gemma4")[0]
    for _ in range(3):
        assert texts(serve(one, [long], sampling))[0] == first
    longer = (*long, *first[:5])
    assert texts(serve(one, [longer], params(4)))[0] == first[5:]


@pytest.mark.thorough
def test_tokens_stay_over_two_devices():
    several = new_engine("first_layer", 2, "gemma4", tensor_parallel_size=2)
    assert texts(serve(several, PROMPTS, GREEDY)) == plain(PROMPTS, GREEDY, "gemma4")


@pytest.mark.thorough
@pytest.mark.oracle
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["gemma4", "gemma4_dense"])
def test_greedy_tokens_are_those_of_transformers(name, devices, tmp_path):
    """Over 200 tokens, many times the window. Over more devices than key-value heads, these are copied."""
    pytest.importorskip("torch")
    model = torch_model(name, 0)
    ours, theirs = greedy_tokens(name, model, devices, tmp_path)
    assert ours == theirs

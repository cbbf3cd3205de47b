"""Layers of one model that differ in heads, head size, window and MLP, or share another layer's keys and values."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.layer import Kept, Moves
from jaxspec.cache.pages import allocate
from jaxspec.common.errors import UserError
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters, random_params
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.model import Model
from jaxspec.models.paged import PagedModel, cache_layout
from jaxspec.models.rope import Rope
from jaxspec.models.sharding import for_degree
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import CPU
from tests.models import forward
from tests.support import tiny_models
from tests.support.sizes import cases
from tests.support.whole_text import whole_logits

LAYERS = (
    LayerConfig(4, 2, 8, 48, 8, query_scale=8**-0.5),
    LayerConfig(4, 4, 16, 96, 16, window=5, rope=Rope(100.0), query_scale=0.2),
    LayerConfig(8, 2, 8, 32, 16, query_scale=8**-0.5, shares=0),
    LayerConfig(4, 4, 16, 48, 8, window=3, query_scale=0.25, shares=1),
)
CONFIG = dataclasses.replace(
    tiny_models.FAMILIES["qwen3"], num_layers=4, windows=(None,) * 4, per_layer=LAYERS, max_model_len=128
)


@functools.cache
def model() -> Model:
    return Model(CONFIG, random_params(CONFIG, jnp.float32, make_placement()))


def test_each_has_its_own_parameters_and_pages():
    shapes = {name: p.shape for name, p in parameters(CONFIG).items()}
    width = CONFIG.width
    assert shapes["layers.0.qkv"] == (width, (4 + 2 * 2) * 8)
    assert shapes["layers.1.qkv"] == (width, (4 + 2 * 4) * 16)
    assert shapes["layers.2.q"] == (width, 8 * 8)
    assert "layers.2.qkv" not in shapes
    assert "layers.3.k_norm" not in shapes
    assert shapes["layers.1.down"] == (96, width)
    layout = cache_layout(CONFIG, page_size=4, num_pages=3, dtype="float32", platform="cpu")
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layout.layers] == [(2, 8), (4, 16)]
    assert layout.page_bytes == 4 * (2 * 2 * 8 + 2 * 4 * 16) * 4


@pytest.mark.thorough
@cases("chunks", [(23,), (9, 1, 5, 8)], quick=[(9, 1, 5, 8)], ids=str)
def test_pages_hold_what_a_whole_pass_sees(chunks):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 23))
    expected = whole_logits(CONFIG, model().params, tokens, Backend(CPU))
    np.testing.assert_allclose(forward.run(CONFIG, model().params, tokens, chunks), expected, atol=2e-5)


def test_a_path_moves_to_its_place_in_both_pools():
    """Layers with a window have pages and slots of their own."""
    layout = cache_layout(CONFIG, page_size=4, num_pages=6, dtype="float32", platform="cpu")
    layout = dataclasses.replace(layout, num_window_pages=3)
    paged = PagedModel(CONFIG, layout, 128, Backend(CPU))
    cache = allocate(layout, make_placement())
    numbered = jax.tree.map(lambda x: x + jnp.arange(len(x) * 4.0).reshape(-1, 4, 1, 1), cache)
    source, stays = jnp.array([[6, 7]]), jnp.array([[False, False]])
    tables = jnp.array([[4, 5]]), jnp.array([[3, 1]])  # the first page has left the window
    place = jnp.array([[5, 6]]), stays
    slots = paged.slots(*place, tables[0]), paged.window_slots(*place, tables[1])
    kept = Kept(jnp.array([3]), tables[0], Moves(source, *slots), tables[1])
    full, window = (np.asarray(layer.pages)[:, :, 0, 0].reshape(-1) for layer in paged.keep(numbered, kept))
    assert (len(full), len(window)) == (24, 12)
    assert full[20:24].tolist() == [20, 22, 23, 23]
    assert window[4:8].tolist() == [4, 6, 7, 7]


SPECULATIVE = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1},
    "tree": {"model": "itself", "tree_width": 2, "tree_depth": 2, "tree_nodes": 4, "adaptive": False},
}
PROMPTS = [[3, 5, 7, 3, 5], [9, 8, 9, 8, 9, 8], [1]]


def outputs(kind: str, devices: int = 1) -> tuple[list[list[int]], int]:
    """Return the greedy ids of a few prompts, and how many drafts were accepted."""
    draft = model() if kind == "tree" else None
    options = {"max_num_seqs": 4, "num_pages": 200, "max_model_len": 96, "tensor_parallel_size": devices}
    engine = tiny_models.engine(model(), SPECULATIVE[kind], draft, **options)
    requests = tiny_models.run(engine, PROMPTS, [SamplingParams(temperature=0.0, max_tokens=30)] * 3)
    return [r.output for r in requests], engine.metrics.num_accepted_tokens


@cases("kind", ["ngram", "tree"], quick=["ngram"])
def test_speculation_changes_no_token(kind):
    expected, _ = outputs("plain")
    found, num_accepted = outputs(kind)
    assert found == expected
    assert num_accepted > 0


@pytest.mark.skipif(jax.device_count() < 2, reason="wants 2 devices: --xla_force_host_platform_device_count")
def test_over_two_devices_tokens_stay():
    assert outputs("plain", devices=2) == outputs("plain")


def test_few_key_value_heads_are_copied_layer_by_layer():
    four = for_degree(CONFIG, 4)
    assert [layer.num_kv_heads for layer in four.layers] == [4, 4, 4, 4]
    assert [layer.kv_copies for layer in four.layers] == [2, 1, 2, 1]
    assert for_degree(four, 1) == CONFIG


def test_they_survive_json():
    assert ModelConfig.from_json(CONFIG.to_json()) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": 3}, "layer 2 shares the keys and values of layer 3"),
        ({"shares": 1}, "keys and values of its own, 2 heads of 8"),
        ({"shares": -1}, "shares the keys and values of layer -1"),
        ({"num_kv_heads": 3}, "8 query heads do not divide among 3"),
        ({"window": 5}, "layer 2 with window=5 shares the keys and values of layer 0 with window=None: both must have"),
        ({"shares": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}, "window=None shares .* with window=5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"mlp_width": 0}, "mlp_width of layer 2=0"),
    ],
    ids=str,
)
def test_what_no_layer_can_be_is_refused(changes, message):
    layers = (*LAYERS[:2], dataclasses.replace(LAYERS[2], **changes), LAYERS[3])
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, per_layer=layers)


def test_all_layers_are_described():
    with pytest.raises(UserError, match="3 layers are described, num_layers=4"):
        dataclasses.replace(CONFIG, per_layer=LAYERS[:3])

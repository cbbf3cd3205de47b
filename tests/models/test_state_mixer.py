"""A mixer whose cache is no list of keys and values: a state of the whole row, which a rejected draft must not change.

It is registered here alone. Everything that it needs from the package is what a new mixer's file has.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.cache.layer import Kept, LayerCache, LayerLayout
from jaxspec.cache.pages import PagedKV
from jaxspec.common.errors import UnsupportedError
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import random_params
from jaxspec.models.mixers import MIXERS
from jaxspec.models.model import Model
from jaxspec.models.parameters import declare as declared
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import CPU
from pallas_kernels.plain import rms_norm
from pallas_kernels.weights import product
from tests.support import tiny_models
from tests.support.sizes import cases
from tests.support.whole_text import whole_logits

DECAY = 0.75


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["page_size"])
@dataclasses.dataclass(frozen=True)
class Sums(LayerCache):
    """state f32[P,E]: in each page the decayed sum after the last position that is written in it."""

    state: jax.Array
    page_size: int

    def keep(self, kept: Kept, backend: Any) -> Sums:
        raise AssertionError("no pass since the last one was kept")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["before", "sums", "positions"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Passed(LayerCache):
    """The cache after a pass, with the sum after each of its tokens: sums f32[B,T,E] at positions i32[B,T]."""

    before: Sums
    sums: jax.Array
    positions: jax.Array

    def keep(self, kept: Kept, backend: Any) -> Sums:
        """Write the sum after the last kept token, and those at the ends of the pages before it."""
        size, num_pages = self.before.page_size, self.before.state.shape[0]
        number = jnp.arange(1, self.positions.shape[1] + 1)
        last = (number == kept.num_kept[:, None]) | (self.positions % size == size - 1)
        page = jnp.take_along_axis(kept.block_table, self.positions // size, axis=1, mode="clip")
        page = jnp.where(last & (number <= kept.num_kept[:, None]), page, num_pages)
        return Sums(self.before.state.at[page].set(self.sums, mode="drop"), size)


@dataclasses.dataclass(frozen=True)
class SumsLayout(LayerLayout):
    width: int
    by_position = False

    def page_bytes(self, page_size: int) -> int:
        return self.width * 4

    def stored_bytes(self, page_size: int, num_devices: int, platform: str) -> int:
        return self.page_bytes(page_size)

    def empty(self, num_pages: int, page_size: int) -> Sums:
        return Sums(jnp.zeros((num_pages, self.width), jnp.float32), page_size)

    def spec(self, placement: Any) -> P:
        return P()


def declare(layer, config, own, dtype, entry) -> None:
    layer.input_norm = declared("norm")(config.width)
    layer.values = declared("matrix", dtype)(config.width, config.width)
    layer.out = declared("matrix", dtype)(config.width, config.width)


def layer_layout(own, dtype, platform) -> SumsLayout:
    return SumsLayout(tiny_models.BASE.width)


def mix(layer, x, normed, memory, read, rows, ropes, backend):
    normed = rms_norm(layer.input_norm[...], x, layer.config.norm_eps) if normed is None else normed
    values = jnp.tanh(product(normed, layer.values[...])).astype(jnp.float32)
    start = jnp.zeros_like(values[:, 0])
    positions = rows.positions
    if memory is not None:
        first = positions[:, 0]
        page = jnp.take_along_axis(rows.block_table, jnp.maximum(first - 1, 0)[:, None] // memory.page_size, axis=1)
        found = jnp.take(memory.state, page[:, 0], axis=0, mode="clip")
        start = jnp.where((first > 0)[:, None], found, start)

    def step(total, value):
        total = DECAY * total + value
        return total, total

    _, sums = lax.scan(step, start, jnp.moveaxis(values, 1, 0))
    sums = jnp.moveaxis(sums, 0, 1)
    return sums.astype(x.dtype), None if memory is None else Passed(memory, sums, positions)


ATTENTION = tiny_models.BASE.layers[0]
SUMS = dataclasses.replace(ATTENTION, mixer="sums")
CONFIG = dataclasses.replace(tiny_models.BASE, per_layer=(SUMS, ATTENTION))
ONLY = dataclasses.replace(CONFIG, per_layer=(SUMS, SUMS))
PROMPTS = [[3, 5, 7, 3, 5], [9, 8, 9, 8, 9, 8] * 4, [1]]
SPECULATIVE = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "model": {"model": "small", "num_speculative_tokens": 2},
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "sums", SimpleNamespace(declare=declare, layer_layout=layer_layout, mix=mix))


@functools.cache
def model(config=CONFIG) -> Model:
    return Model(config, random_params(config, jnp.float32, make_placement()))


def engine(kind: str, config=CONFIG, **options):
    draft = tiny_models.model(tiny_models.small()) if kind == "model" else None
    options = {"max_num_seqs": 4, "num_pages": 60, "page_size": 8, "max_model_len": 96} | options
    return tiny_models.engine(model(config), SPECULATIVE[kind], draft, **options)


def outputs(engine, prompts=PROMPTS, **params) -> list[list[int]]:
    return tiny_models.outputs(engine, prompts, SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | params))


def plain(config=CONFIG) -> list[list[int]]:
    return known(config)


@functools.cache
def known(config) -> list[list[int]]:
    return outputs(engine("plain", config))


@cases("config", [CONFIG, ONLY], quick=[CONFIG], ids=["mixed", "alone"])
def test_pages_hold_the_state_of_a_whole_pass(config):
    longest = max(map(len, PROMPTS)) + 40
    for prompt, output in zip(PROMPTS, plain(config), strict=True):
        tokens = np.resize(prompt + output, (1, longest))  # what follows the text changes nothing in it
        found = np.asarray(whole_logits(config, model(config).params, tokens, Backend(CPU)))
        logits = found[0, len(prompt) - 1 : len(prompt) - 1 + len(output)]
        np.testing.assert_allclose(logits[np.arange(len(output)), output], np.max(logits, axis=-1), atol=2e-5)


@cases(
    ("kind", "config"),
    [("ngram", CONFIG), ("ngram", ONLY), ("model", CONFIG), ("model", ONLY)],
    quick=[("ngram", ONLY), ("model", CONFIG)],
    ids=["ngram-mixed", "ngram-alone", "model-mixed", "model-alone"],
)
def test_speculation_changes_no_token(kind, config):
    found = engine(kind, config)
    assert outputs(found) == plain(config)
    assert 0 < found.metrics.num_accepted_tokens < found.metrics.num_draft_tokens


def test_a_state_that_keeps_rejected_drafts_changes_tokens(monkeypatch):
    expected, keep = plain(), Passed.keep
    everything = lambda self, kept, backend: keep(
        self, kept._replace(num_kept=jnp.where(kept.num_kept > 0, self.positions.shape[1], 0)), backend
    )
    monkeypatch.setattr(Passed, "keep", everything)
    assert outputs(engine("ngram")) != expected


def test_a_known_beginning_and_a_preempted_request_keep_the_state():
    found = engine("ngram", num_pages=12)
    assert outputs(found) == plain()
    assert found.scheduler.num_preemptions
    reused = engine("ngram")
    longer = [*PROMPTS[1], *plain()[1][:9]]
    outputs(reused)
    assert outputs(reused, [longer], max_tokens=31) == [plain()[1][9:]]


def test_samples_share_no_page_that_one_of_them_writes():
    """The second sample begins when another request ends; by then the first has gone on."""
    prompt = PROMPTS[1][:18]
    (expected,) = outputs(engine("plain", ONLY), [prompt])
    found = engine("ngram", ONLY, max_num_seqs=2)
    params = [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(temperature=0.0, max_tokens=40, n=2)]
    _, first = tiny_models.run(found, [PROMPTS[2], prompt], params)
    assert [sample.output for sample in first.samples] == [expected] * 2


def test_a_draft_and_a_tree_are_refused():
    target = tiny_models.model(tiny_models.BASE)
    with pytest.raises(UnsupportedError, match="the draft has layers with a state"):
        tiny_models.engine(target, SPECULATIVE["model"], model(), num_pages=20)
    tree = {"model": "small", "tree_width": 2, "tree_depth": 2, "tree_nodes": 4}
    with pytest.raises(UnsupportedError, match="the target has layers with a state"):
        tiny_models.engine(model(), tree, tiny_models.model(tiny_models.small()), num_pages=20)


def test_keys_and_values_need_no_keep():
    """A rejected token of a chain costs them nothing: its slot is overwritten."""
    cache = PagedKV(jnp.zeros((2, 4, 2, 8)))
    assert cache.keep(Kept(jnp.ones(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)), None) is cache

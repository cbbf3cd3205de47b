"""A new draft: its vocabulary, its shape, and what it takes over from its target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.parallel.mesh import make_mesh
from jaxspec.train.build import draft_config, first_params, projected, target_layers, vocabulary
from jaxspec.train.options import TrainOptions
from tests import lively, tiny

TARGET = lively.target()
SMOLLM2 = dataclasses.replace(
    tiny.BASE,
    vocab_size=49152,
    num_layers=30,
    windows=(None,) * 30,
    width=576,
    mlp_width=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
)


def options(**given) -> TrainOptions:
    return TrainOptions(target="x", data=Path("x"), out=Path("x"), **given)


def params(**given):
    config = draft_config(TARGET.config, options(**given))
    counts = np.arange(TARGET.config.vocab_size)
    ids = vocabulary(counts, config.reduced_vocab_size) if config.reduced_vocab_size else {}
    return config, ids, first_params(config, TARGET, ids, make_mesh(), seed=3, from_target=True)


def test_the_frequent_ids_are_kept():
    ids = vocabulary(np.array([5, 0, 7, 7, 1, 9]), 4)
    np.testing.assert_array_equal(ids["d2t"], [2, 3, 5, 6])
    np.testing.assert_array_equal(ids["t2d"], [3, 3, 0, 1, 3, 2])


def test_default_shape():
    c = draft_config(SMOLLM2, options())
    shape = (c.num_layers, c.width, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_width, c.table_size)
    assert shape == (2, 384, 6, 3, 64, 1024, 16384)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_family_stays(family):
    target = dataclasses.replace(tiny.FAMILIES[family], num_layers=2)
    c = draft_config(target, options(layers=1, width=48))
    kept = ("family", "rope", "local_rope", "qk_norm", "qkv_bias", "sandwich_norm", "head_dim", "eos_ids")
    assert [getattr(c, name) for name in kept] == [getattr(target, name) for name in kept]
    assert c.windows == target.windows[:1]
    assert c.tied
    assert c.reduced_vocab_size is None
    assert c.embed_scale == (48**0.5 if family == "gemma3" else 1.0)


def test_layers_are_spread_over_the_target():
    assert [target_layers(30, n) for n in (1, 2, 3, 4)] == [[0], [0, 29], [0, 14, 29], [0, 10, 19, 29]]


def test_a_draft_of_the_targets_width_begins_with_its_layers():
    config, ids, own = params(width=32, layers=1, vocab_size=40)
    for name in ("layers.0.qkv", "layers.0.down", "layers.0.mlp_norm", "norm"):
        np.testing.assert_array_equal(own[name], TARGET.params[name], err_msg=name)
    kept = ids["d2t"][:-1]
    np.testing.assert_array_equal(own["embed"][:-1], TARGET.params["embed"][kept])
    lacking = np.setdiff1d(np.arange(config.vocab_size), kept)
    np.testing.assert_allclose(own["embed"][-1], TARGET.params["embed"][lacking].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_random():
    _, _, own = params(width=48, heads=4, layers=1)
    assert own["layers.0.qkv"].shape == (48, 128)
    assert (own["norm"] == 0.5).all()
    _, _, own = params(width=32, layers=1, mlp_width=64)
    np.testing.assert_array_equal(own["layers.0.qkv"], TARGET.params["layers.0.qkv"])
    assert own["layers.0.gate_up"].shape == (32, 128)
    assert 0 < float(jnp.std(own["layers.0.gate_up"])) < 1


@pytest.mark.parametrize("width", [8, 16])
def test_the_projection_is_the_best_of_its_rank(width):
    """Inner products of rows, which a tied head scores by, are kept as well as any table of this width can: what the
    singular values beyond it lose (Eckart and Young)."""
    table = np.random.default_rng(2).standard_normal((50, 32)).astype(np.float32) * np.linspace(3, 0.1, 32)
    small = projected(table, {}, width)
    assert small.shape == (50, width)
    values = np.linalg.svd(table, compute_uv=False)
    error = np.linalg.norm(table @ table.T - small @ small.T)
    assert error == pytest.approx(np.sqrt(np.sum(values[width:] ** 4)), rel=1e-3)


def test_a_wider_draft_keeps_the_table():
    table = np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    np.testing.assert_array_equal(projected(table, {}, 6), np.pad(table, ((0, 0), (0, 2))))

"""A new draft: its vocabulary, its shape, and what it takes over from its target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.parallel.placement import make_placement
from jaxspec.train.build import coordinates, draft_config, first_params, layers_of, target_layers, vocabulary
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.weights import grouped
from tests.support import lively_models, tiny_models

TARGET = lively_models.target()
SMOLLM2 = dataclasses.replace(
    tiny_models.BASE,
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
    ids = vocabulary(np.arange(TARGET.config.vocab_size), config)
    return config, ids, first_params(config, TARGET, ids, make_placement(), seed=3, from_target=True)


def test_the_frequent_ids_come_first():
    config = dataclasses.replace(TARGET.config, tied=False, reduced_vocab_size=4, rare_vocab_size=2, rare_width=1)
    ids = vocabulary(np.array([5, 1, 7, 7, 2, 9]), config)
    np.testing.assert_array_equal(ids["d2t"], [2, 5, 0, 3])
    np.testing.assert_array_equal(ids["t2d"], [2, 4, 0, 3, 4, 1])
    assert vocabulary(np.arange(9), TARGET.config) == {}


def test_default_shape():
    c = draft_config(SMOLLM2, options())
    shape = (c.num_layers, c.width, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_width, c.head_size)
    assert shape == (2, 384, 6, 3, 64, 1024, 16384)
    assert (c.rare_vocab_size, c.rare_width, c.embed_width) == (8192, 96, 576)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"vocab_size": 49152}, (None, 0, 0)),
        ({"vocab_size": 49152, "rare_ids": 40000}, (49152, 40000, 96)),
        ({"rare_ids": 0}, (16384, 0, 0)),
        ({"vocab_size": 1000, "rare_ids": 300, "rare_width": 7}, (1000, 300, 7)),
    ],
)
def test_rare_ids(given, found):
    c = draft_config(SMOLLM2, options(**given))
    assert (c.reduced_vocab_size, c.rare_vocab_size, c.rare_width) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rare_ids": 16384}, "--rare-ids 16384 must be less than the draft's 16384 ids"),
        ({"rare_ids": 0, "rare_width": 8}, "--rare-width 8 needs rare ids, and there are none"),
    ],
)
def test_rare_ids_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        draft_config(SMOLLM2, options(**given))


def test_a_target_whose_layers_differ_is_refused():
    with pytest.raises(NotImplementedError, match="those of a gemma4 differ: train a head"):
        draft_config(tiny_models.FAMILIES["gemma4"], options(layers=1))


@pytest.mark.parametrize("family", [name for name, c in tiny_models.FAMILIES.items() if not c.per_layer])
def test_the_family_stays(family):
    target = dataclasses.replace(tiny_models.FAMILIES[family], num_layers=2)
    c = draft_config(target, options(layers=1, width=48))
    kept = ("family", "rope", "local_rope", "qk_norm", "qkv_bias", "sandwich_norm", "head_dim", "eos_ids")
    assert [getattr(c, name) for name in kept] == [getattr(target, name) for name in kept]
    assert c.windows == target.windows[:1]
    assert (c.tied, c.reduced_vocab_size, c.rare_vocab_size) == (False, None, 0)
    assert (c.embed_width, c.embed_scale) == (32, target.embed_scale)


def test_layers_are_spread_over_the_target():
    assert [target_layers(30, n) for n in (1, 2, 3, 4)] == [[0], [0, 29], [0, 14, 29], [0, 10, 19, 29]]


def test_a_draft_of_the_targets_width_begins_with_its_layers():
    _, ids, own = params(width=32, layers=1, vocab_size=40, rare_width=32)
    for name in ("layers.0.qkv", "layers.0.down", "layers.0.mlp_norm", "norm", "embed"):
        np.testing.assert_array_equal(own[name], TARGET.params[name], err_msg=name)
    np.testing.assert_array_equal(own["embed_in"], np.eye(32))
    np.testing.assert_array_equal(own["head"].T, TARGET.params["embed"][ids["d2t"][:20]])
    np.testing.assert_array_equal((own["rare_in"] @ own["rare_head"]).T, TARGET.params["embed"][ids["d2t"][20:]])


@pytest.mark.parametrize("vocab_size", [None, 40])
def test_a_head_of_its_own_is_taken_over_too(vocab_size):
    untied = lively_models.wrong(TARGET)
    config = draft_config(untied.config, options(width=32, layers=1, vocab_size=vocab_size, rare_ids=0))
    ids = vocabulary(np.arange(TARGET.config.vocab_size), config)
    own = first_params(config, untied, ids, make_placement(), seed=3, from_target=True)
    kept = ids["d2t"] if ids else np.arange(TARGET.config.vocab_size)
    np.testing.assert_array_equal(own["head"], untied.params["head"][:, kept])


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
    """Inner products of rows, which a head scores by, are kept as well as any table of this width can: what the
    singular values beyond it lose (Eckart and Young)."""
    table = np.random.default_rng(2).standard_normal((50, 32)).astype(np.float32) * np.linspace(3, 0.1, 32)
    small = table @ coordinates(table, width)
    assert small.shape == (50, width)
    values = np.linalg.svd(table, compute_uv=False)
    error = np.linalg.norm(table @ table.T - small @ small.T)
    assert error == pytest.approx(np.sqrt(np.sum(values[width:] ** 4)), rel=1e-3)


def test_a_wider_draft_keeps_the_table():
    table = np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    np.testing.assert_array_equal(table @ coordinates(table, 6), np.pad(table, ((0, 0), (0, 2))))


def test_layers_of_a_quantised_target_are_dequantised():
    name = "layers.0.qkv"
    weight = grouped.quantise(TARGET.params[name], grouped.in_four_bits(16))
    quantised = dataclasses.replace(TARGET, params=TARGET.params | {name: weight})
    config = dataclasses.replace(TARGET.config, num_layers=1, windows=(None,))
    assert set(target_layers(TARGET.config.num_layers, 1)) == {0}
    np.testing.assert_array_equal(layers_of(quantised, config)[name], weight.dense())

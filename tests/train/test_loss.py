"""The losses are what their names say, and cutting the sequence, the batch or the vocabulary changes nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.models.decoder import whole
from jaxspec.models.layers import Backend
from jaxspec.parallel.mesh import make_mesh, sharding
from jaxspec.train import loss as losses
from jaxspec.train import step as steps
from jaxspec.train.build import vocabulary
from jaxspec.train.loss import loss_sums, own_ids_first
from tests import laws, lively, tiny
from tests.train import runs

BACKEND = Backend("cpu", None, "reference")
SIZE = 24
IDS = vocabulary(np.random.default_rng(3).permutation(tiny.BASE.vocab_size), SIZE)
TARGET = lively.target()
FULL = tiny.model(tiny.small(), 5)
REDUCED = tiny.model(dataclasses.replace(tiny.small(), reduced_vocab_size=SIZE), 5)
REDUCED = dataclasses.replace(REDUCED, params={**REDUCED.params, **{n: jnp.asarray(x) for n, x in IDS.items()}})
TOKENS = np.random.default_rng(0).integers(0, tiny.BASE.vocab_size, (4, 12)).astype(np.int32)
MASK = np.random.default_rng(1).random((4, 12)) < 0.6
MASK[:, 0] = MASK[0, 10:] = False
WEIGHTS = {"kl": 1.0, "rkl": 0.5, "tv": 2.0}


def sums(draft, weights, target=TARGET, tokens=TOKENS, mask=MASK):
    ordered = own_ids_first(target, IDS["d2t"] if draft is REDUCED else None)
    configs = (ordered.config, draft.config)
    run = jax.jit(lambda d, t: loss_sums(configs, weights, BACKEND, d, t, tokens, mask))
    total, told = run(draft.params, ordered.params)
    return float(total), {name: float(x) for name, x in told.items()}


def distributions(draft):
    """p, q [tokens that count, V] after the tokens before each; q over the target's ids, 0 for those it lacks."""
    found = []
    for m in (TARGET, draft):
        decoder, hidden = whole(m.config, m.params, jnp.asarray(TOKENS), BACKEND)
        logits = np.asarray(decoder.logits(hidden, BACKEND), np.float64)
        if m is REDUCED:
            logits = logits[..., IDS["t2d"]]
        found.append(laws.softmax(logits)[:, :-1][MASK[:, 1:]])
    return found


@pytest.mark.parametrize("draft", [FULL, REDUCED], ids=["full", "reduced"])
def test_against_numpy(draft):
    p, q = distributions(draft)
    own = q > 0
    log = lambda x: np.log(np.where(own, x, 1.0))
    expected = {
        "kl": np.sum(np.where(own, p, 0.0) * (log(p) - log(q))),
        "rkl": np.sum(q * (log(q) - log(p))),
        "tv": np.sum(1.0 - np.minimum(p, q).sum(axis=-1)),
    }
    for name, value in expected.items():
        assert sums(draft, {name: 1.0})[0] == pytest.approx(value, rel=1e-4), name
    told = sums(draft, {"kl": 1.0})[1]
    assert told["tv"] == pytest.approx(expected["tv"], rel=1e-4)
    assert told["lost"] == pytest.approx(np.sum(np.where(own, 0.0, p)), rel=1e-4, abs=1e-4)
    assert told["agree"] == np.sum(p.argmax(axis=-1) == q.argmax(axis=-1))
    assert sums(draft, WEIGHTS)[0] == pytest.approx(sum(w * expected[n] for n, w in WEIGHTS.items()), rel=1e-4)


def test_a_draft_that_is_its_target_loses_nothing():
    total, told = sums(TARGET, WEIGHTS)
    assert total == pytest.approx(0.0, abs=1e-3)
    assert told["agree"] == MASK.sum()


def test_pieces_add_up(monkeypatch):
    whole_sum = sums(REDUCED, WEIGHTS)
    monkeypatch.setattr(losses, "PIECE", 4 * 3 * tiny.BASE.vocab_size)
    assert losses.num_pieces(4, 12, tiny.BASE.vocab_size) == 4
    assert sums(REDUCED, WEIGHTS)[0] == pytest.approx(whole_sum[0], rel=1e-5)


def test_what_does_not_count_changes_nothing():
    after = TOKENS.copy()
    last = MASK[0].nonzero()[0].max()
    after[0, last + 1 :] = 1
    assert last < 11
    assert sums(FULL, WEIGHTS, tokens=after)[0] == pytest.approx(sums(FULL, WEIGHTS)[0], rel=1e-5)
    after[0, last] = (after[0, last] + 1) % 64  # a token that is to be predicted does not bear on its own loss
    assert sums(FULL, WEIGHTS, tokens=after)[0] == pytest.approx(sums(FULL, WEIGHTS)[0], rel=1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_parts_of_a_batch_make_the_same_step(accumulate, tmp_path):
    """Also where the parts hold different numbers of tokens that count."""
    ordered = own_ids_first(TARGET, IDS["d2t"])
    ids = {name: REDUCED.params[name] for name in IDS}

    def after(parts):
        options = runs.options(tmp_path, "x", batch_size=4, accumulate=parts, warmup=0, steps=10)
        state = steps.first_state(REDUCED.params, options, sharding(make_mesh()))
        step = steps.make_step(ordered.config, REDUCED.config, ids, options, BACKEND)
        state, metrics = step(state, 0.01, ordered.params, TOKENS, MASK)
        return state, metrics

    (once, told), (parts, also_told) = after(1), after(accumulate)
    assert float(told["loss"]) == pytest.approx(float(also_told["loss"]), rel=1e-5)
    assert float(told["gradient"]) == pytest.approx(float(also_told["gradient"]), rel=1e-4)
    moments = lambda state: optax.tree.get(state.optimizer, "mu")  # a multiple of the gradient, of a first step
    for name, value in moments(once).items():
        assert np.any(value), name
        np.testing.assert_allclose(moments(parts)[name], value, rtol=1e-3, atol=1e-6, err_msg=name)
        assert not np.array_equal(once.params[name], REDUCED.params[name]), name


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_step_lowers_for_accelerators(platform, tmp_path):
    ordered, options = own_ids_first(TARGET, IDS["d2t"]), runs.options(tmp_path, "x", batch_size=4, accumulate=2)
    ids = {name: REDUCED.params[name] for name in IDS}
    backend = Backend({"cuda": "gpu"}.get(platform, platform), None, "reference")
    step = steps.make_step(ordered.config, REDUCED.config, ids, options, backend)
    state = steps.first_state(REDUCED.params, options, sharding(make_mesh()))
    target = {name: x.astype(jnp.bfloat16) for name, x in ordered.params.items()}
    exported = jax.export.export(step, platforms=[platform])(state, jnp.float32(1), target, TOKENS, MASK)
    assert exported.platforms == (platform,)
    metrics = exported.out_tree.unflatten(exported.out_avals)[1]
    assert {name: x.dtype for name, x in metrics.items()} == dict.fromkeys(metrics, jnp.float32)

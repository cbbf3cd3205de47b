"""The losses are what their names say, with all ids and with the n likeliest, and cutting the sequence, the batch or
the vocabulary changes nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.models.backend import Backend
from jaxspec.parallel.placement import make_placement
from jaxspec.train import loss as losses
from jaxspec.train import step as steps
from jaxspec.train.build import vocabulary
from jaxspec.train.loss import loss_sums, own_ids_first
from jaxspec.train.top_tokens import top
from pallas_kernels.device import CPU, named
from tests.support import exact, lively_models, tiny_models
from tests.support.sizes import cases
from tests.support.whole_text import whole_logits
from tests.train import runs

BACKEND = Backend(CPU, None, "reference")
SIZE, VOCAB = 24, tiny_models.BASE.vocab_size
SHAPE = dataclasses.replace(tiny_models.small(), tied=False, reduced_vocab_size=SIZE, rare_vocab_size=8, rare_width=4)
IDS = vocabulary(np.random.default_rng(3).permutation(tiny_models.BASE.vocab_size), SHAPE)
TARGET = lively_models.target()
ORDERED = own_ids_first(TARGET, IDS["d2t"])
FULL = tiny_models.model(tiny_models.small(), 5)
REDUCED = tiny_models.model(SHAPE, 5)
REDUCED = dataclasses.replace(REDUCED, params={**REDUCED.params, **{n: jnp.asarray(x) for n, x in IDS.items()}})
TOKENS = np.random.default_rng(0).integers(0, tiny_models.BASE.vocab_size, (4, 12)).astype(np.int32)
MASK = np.random.default_rng(1).random((4, 12)) < 0.6
MASK[:, 0] = MASK[0, 10:] = False
WEIGHTS = {"kl": 1.0, "rkl": 0.5, "tv": 2.0}


def listed(n):
    """What a target says of TOKENS by its n likeliest ids, in float32."""
    ids, log_p = jax.jit(top, static_argnums=1)(whole_logits(TARGET.config, TARGET.params, TOKENS, BACKEND), n)
    return {"ids": ids, "log_p": log_p}


def sums(draft, weights, target=TARGET, tokens=TOKENS, mask=MASK, **told):
    ordered = own_ids_first(target, IDS["d2t"] if draft is REDUCED else None)
    configs, batch = (ordered.config, draft.config), {"tokens": tokens, "mask": mask, **told}
    params = {} if told else ordered.params
    run = jax.jit(lambda d, t: loss_sums(configs, weights, BACKEND, jnp.float32, d, t, batch))
    total, told = run(draft.params, params)
    return float(total), {name: float(x) for name, x in told.items()}


def distributions(draft):
    """p, q [tokens that count, V] after the tokens before each; q over the target's ids, 0 for those it lacks."""
    found = []
    for m in (TARGET, draft):
        logits = np.asarray(whole_logits(m.config, m.params, TOKENS, BACKEND), np.float64)
        if m is REDUCED:
            logits = np.pad(logits, [(0, 0), (0, 0), (0, 1)], constant_values=-np.inf)[..., IDS["t2d"]]
        found.append(exact.softmax(logits)[:, :-1][MASK[:, 1:]])
    return found


def coarsened(p, q, n):
    """p, q [tokens, n] of the target's n likeliest ids, and [tokens, 1] of all others together."""
    ids = np.argsort(-p, axis=-1)[:, :n]
    pick = lambda x: np.take_along_axis(x, ids, axis=-1)
    return pick(p), pick(q), *(1.0 - pick(x).sum(axis=-1, keepdims=True) for x in (p, q))


@cases("n", [None, 1, 5, VOCAB], quick=[None, 5])
@pytest.mark.parametrize("draft", [FULL, REDUCED], ids=["full", "reduced"])
def test_against_numpy(draft, n):
    p, q = distributions(draft)
    agree, told = np.sum(p.argmax(axis=-1) == q.argmax(axis=-1)), {}
    if n is None:
        p_rest, q_rest = np.zeros((2, len(p), 1))
    else:
        told = listed(n)
        p, q, p_rest, q_rest = coarsened(p, q, n)
    own = q > 0
    log = lambda x: np.log(np.where(x > 1e-9, x, 1.0))
    kl = lambda p, q: np.sum(np.where(q > 1e-9, p * (log(p) - log(q)), 0.0))
    expected = {
        "kl": kl(p, q) + kl(p_rest, q_rest),
        "rkl": kl(np.where(own, q, 0.0), np.where(own, p, 0.0)) + kl(q_rest, p_rest),
        "tv": np.sum(1.0 - np.minimum(p, q).sum(axis=-1)),
    }
    for name, value in expected.items():
        assert sums(draft, {name: 1.0}, **told)[0] == pytest.approx(value, rel=2e-4), name
    found = sums(draft, {"kl": 1.0}, **told)[1]
    assert found["tv"] == pytest.approx(expected["tv"], rel=1e-4)
    assert found["lost"] == pytest.approx(np.sum(np.where(own, 0.0, p)), rel=1e-4, abs=1e-4)
    assert found["agree"] == agree
    assert sums(draft, WEIGHTS, **told)[0] == pytest.approx(sum(w * expected[n] for n, w in WEIGHTS.items()), rel=1e-4)


@pytest.mark.parametrize("draft", [FULL, REDUCED], ids=["full", "reduced"])
def test_all_ids_listed_are_all_ids(draft):
    (loss, told), (also_loss, also_told) = sums(draft, WEIGHTS), sums(draft, WEIGHTS, **listed(VOCAB))
    assert also_loss == pytest.approx(loss, rel=1e-4)
    assert also_told == pytest.approx(told, rel=1e-4, abs=1e-3)


@pytest.mark.thorough
def test_fewer_ids_never_flatter():
    lengths = [sums(REDUCED, {"tv": 1.0}, **listed(n))[0] for n in (1, 2, 4, 8, 16, VOCAB)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] + 1.0


@cases("n", [1, 5, VOCAB], quick=[5])
@cases("draft", [FULL, REDUCED], quick=[REDUCED], ids=["full", "reduced"])
def test_gradients_are_those_of_the_dense_formula(draft, n):
    """Written out over all V ids of the target, with what is listed as a mask."""
    size = draft.config.head_size
    rng = np.random.default_rng(n)
    p = exact.softmax(3 * rng.standard_normal((6, VOCAB)))
    t2d = IDS["t2d"] if draft is REDUCED else np.arange(VOCAB)
    logits = (2 * rng.standard_normal((6, size))).astype(np.float32)
    ids, log_p = top(jnp.log(jnp.asarray(p, jnp.float32)), n)
    among = np.zeros((6, VOCAB), bool)
    np.put_along_axis(among, np.asarray(ids), True, axis=-1)
    has = among & (t2d < size)

    def dense(logits):
        q = jax.nn.softmax(logits)[:, np.minimum(t2d, size - 1)]
        mean = lambda x: jnp.sum(jnp.where(has, x, 0.0))
        safe = jnp.where(has, q, 1.0)
        rest_p = jnp.maximum(1.0 - jnp.sum(jnp.where(among, p, 0.0), axis=-1), losses.LEAST)
        rest_q = jnp.maximum(1.0 - jnp.sum(jnp.where(has, q, 0.0), axis=-1), losses.LEAST)
        ratio, rest = jnp.log(p / safe), jnp.log(rest_p / rest_q)
        kl, rkl = mean(p * ratio) + jnp.sum(rest_p * rest), -mean(q * ratio) - jnp.sum(rest_q * rest)
        return WEIGHTS["kl"] * kl + WEIGHTS["rkl"] * rkl + WEIGHTS["tv"] * (6.0 - mean(jnp.minimum(p, q)))

    def listed(logits):
        each = losses.distances(WEIGHTS, losses.stored(draft.params, ids, log_p), logits)
        return sum(jnp.sum(weight * each[name]) for name, weight in WEIGHTS.items())

    slopes = (jax.jit(jax.value_and_grad(f)) for f in (listed, dense))
    (value, slope), (expected, dense_slope) = (f(jnp.asarray(logits)) for f in slopes)
    assert float(value) == pytest.approx(float(expected), rel=1e-4)
    assert np.abs(dense_slope).max() > 0.05
    np.testing.assert_allclose(slope, dense_slope, atol=2e-4)


def test_a_draft_that_is_its_target_loses_nothing():
    total, told = sums(TARGET, WEIGHTS)
    assert total == pytest.approx(0.0, abs=1e-3)
    assert told["agree"] == MASK.sum()


@pytest.mark.parametrize(("n", "size"), [(None, VOCAB), (5, SIZE)], ids=["all", "5"])
def test_pieces_add_up(monkeypatch, n, size):
    told = {} if n is None else listed(n)
    whole_sum = sums(REDUCED, WEIGHTS, **told)
    monkeypatch.setattr(losses, "PIECE", 4 * 3 * size)
    assert losses.num_pieces(4, 12, size) == 4
    assert sums(REDUCED, WEIGHTS, **told)[0] == pytest.approx(whole_sum[0], rel=1e-5)


def test_what_does_not_count_changes_nothing():
    after = TOKENS.copy()
    last = MASK[0].nonzero()[0].max()
    after[0, last + 1 :] = 1
    assert last < 11
    assert sums(FULL, WEIGHTS, tokens=after)[0] == pytest.approx(sums(FULL, WEIGHTS)[0], rel=1e-5)
    after[0, last] = (after[0, last] + 1) % 64  # a token that is to be predicted does not bear on its own loss
    assert sums(FULL, WEIGHTS, tokens=after)[0] == pytest.approx(sums(FULL, WEIGHTS)[0], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [None, 5])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_parts_of_a_batch_make_the_same_step(accumulate, n, tmp_path):
    """Also where the parts hold different numbers of tokens that count."""
    batch = {"tokens": TOKENS, "mask": MASK, **({} if n is None else listed(n))}
    ids = {name: REDUCED.params[name] for name in IDS}

    def after(parts):
        options = runs.options(tmp_path, "x", batch_size=4, accumulate=parts, warmup=0, steps=10)
        state = steps.first_state(REDUCED, options, make_placement().sharding())
        step = steps.make_step(ORDERED.config, REDUCED.config, options, BACKEND, jnp.float32)
        state, metrics = step(state, 0.01, (ids, ORDERED.params if n is None else {}), batch)
        return state, metrics

    (once, told), (parts, also_told) = after(1), after(accumulate)
    assert float(told["loss"]) == pytest.approx(float(also_told["loss"]), rel=1e-5)
    assert float(told["gradient"]) == pytest.approx(float(also_told["gradient"]), rel=1e-4)

    def moments(state):
        """A multiple of the gradient, of a first step."""
        found = (mu.items() for _, mu in optax.tree.get_all_with_path(state.optimizer, "mu"))
        return {name: x for items in found for name, x in items if not isinstance(x, optax.MaskedNode)}

    assert moments(once).keys() == once.params.keys()
    for name, value in moments(once).items():
        assert np.any(value), name
        np.testing.assert_allclose(moments(parts)[name], value, rtol=1e-3, atol=1e-6, err_msg=name)
        assert not np.array_equal(once.params[name], REDUCED.params[name]), name


def test_which_matrices_change_alike_in_all_directions(tmp_path):
    """Muon's do: the singular values of an update differ little, however the gradient's do."""
    rng, shapes = np.random.default_rng(4), {"embed_in": (24, 16), "layers.0.down": (24, 16), "head": (16, 24)}
    steep = lambda rows, columns: rng.normal(size=(rows, columns)) * 0.7 ** np.arange(columns)
    grads = {name: jnp.asarray(steep(*shape), jnp.float32) for name, shape in shapes.items()}
    grads["norm"] = jnp.ones(16)
    params = jax.tree.map(jnp.zeros_like, grads)
    config = dataclasses.replace(REDUCED.config, embed_width=32)
    optimizer = steps.make_optimizer(runs.options(tmp_path, "x"), config)
    updates = optimizer.update(grads, optimizer.init(params), params)[0]
    values = {name: np.linalg.svd(updates[name], compute_uv=False) for name in shapes}
    spread = {name: found[-1] / found[0] for name, found in values.items()}
    assert min(spread["embed_in"], spread["layers.0.down"]) > 0.4
    assert spread["head"] < 0.3
    assert all(0.1 < np.sqrt(np.mean(np.square(x))) < 3.0 for x in updates.values())  # for one learning rate


@cases("n", [None, 5], quick=[5])
@cases("platform", ["cuda", "tpu"], quick=["tpu"])
def test_a_step_lowers_for_accelerators(platform, n, tmp_path):
    options = runs.options(tmp_path, "x", batch_size=4, accumulate=2)
    ids = {name: REDUCED.params[name] for name in IDS}
    backend = Backend(named(platform), None, "reference")
    step = steps.make_step(ORDERED.config, REDUCED.config, options, backend, jnp.bfloat16)
    state = steps.first_state(REDUCED, options, make_placement().sharding())
    target, told = {name: x.astype(jnp.bfloat16) for name, x in ORDERED.params.items()}, {}
    if n is not None:
        target, told = {}, {"ids": np.zeros((4, 12, n), np.uint16), "log_p": np.zeros((4, 12, n), np.float16)}
    batch = {"tokens": TOKENS, "mask": MASK, **told}
    exported = jax.export.export(step, platforms=[platform])(state, jnp.float32(1), (ids, target), batch)
    assert exported.platforms == (platform,)
    metrics = exported.out_tree.unflatten(exported.out_avals)[1]
    assert {name: x.dtype for name, x in metrics.items()} == dict.fromkeys(metrics, jnp.float32)

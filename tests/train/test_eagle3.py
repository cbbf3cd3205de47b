"""A head of EAGLE-3 in training: its passes are those of a round, its folder is read back, and it becomes good."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import orbax
from jaxspec import LLM, SamplingParams, UserError
from jaxspec.engine.setup import Model
from jaxspec.loading import load, load_draft
from jaxspec.models.decoder import bind, whole
from jaxspec.models.layers import Backend, Rows
from jaxspec.parallel.placement import make_placement
from jaxspec.train import eagle3, loop
from jaxspec.train.loss import own_ids_first
from pallas_kernels.device import CPU
from tests.drafters.references import eagle3 as reference
from tests.drafters.references.common import Features
from tests.train import runs
from tests.train.test_train import journal, state

K, LAYERS = 4, 6
BACKEND = Backend(CPU, None, "reference")
LEFT_OUT = dict.fromkeys(("layers", "width", "kv_heads"))  # of runs.options, which are of a draft model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("eagle3")
    runs.write(path, layers=LAYERS)
    return path


def options(root, out, **changes):
    return runs.options(root, out, method="eagle3", **LEFT_OUT | {"heads": 4, "num_speculative_tokens": K} | changes)


@pytest.fixture(scope="module")
def target(root):
    source = checkpoints.resolve(str(root / "target"))
    return source, load(source, jnp.float32, make_placement())


@pytest.fixture(scope="module")
def head(root, target, tmp_path_factory):
    """(as it begins, but with norms that are not 1; its folder)."""
    found = eagle3.new(options(root, "x"), target[1], np.arange(runs.VOCAB)[::-1], make_placement())
    rng = np.random.default_rng(0)
    noisy = lambda x: x * (1 + 0.3 * rng.standard_normal(x.shape)).astype(np.float32) if x.ndim == 1 else x
    params = {name: x if x.dtype == jnp.int32 else jnp.asarray(noisy(x)) for name, x in found.params.items()}
    folder = tmp_path_factory.mktemp("head") / "head"
    eagle3.save(folder, params, found.config, "0" * 64)
    return Model(found.config, params), folder


def test_it_is_read_back(target, head):
    """Number for number."""
    mine, folder = head
    theirs = load_draft(checkpoints.resolve(str(folder)), jnp.float32, make_placement(), target[1], "target")
    for name in ("family", "taps", "reduced_vocab_size", "num_kv_heads", "mlp_width", "rope", "norm_eps", "has_head"):
        assert getattr(theirs.config, name) == getattr(mine.config, name), name
    assert theirs.params.keys() == mine.params.keys()
    for name, x in mine.params.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(theirs.params[name]), err_msg=name)


@pytest.mark.parametrize("length", [2, 3, 11])
def test_its_passes_are_those_of_a_round(target, head, length):
    """What a reference proposes after a prompt, a pass says at the place of each draft."""
    (_, model), (mine, folder) = target, head
    tokens = np.random.default_rng(length).integers(5, runs.VOCAB, length).tolist()
    config, row = model.config, jnp.asarray([tokens], jnp.int32)
    taps = tuple(range(config.num_layers + 1))
    rows = Rows(jnp.arange(length, dtype=jnp.int32)[None])
    hidden, _, tapped = bind(config, model.params)(row, (None,) * config.num_layers, rows, BACKEND, taps=taps)
    known = {i: np.asarray(x, np.float64)[0, :-1] for i, x in zip(taps, tapped, strict=True)}
    table, way = (np.asarray(model.params[name], np.float64) for name in ("embed", "head"))
    lent = Features(table, way.T, np.asarray(hidden, np.float64)[0, :-1], known)
    drafts, logits = reference.proposals(folder, lent, tokens, K)

    ids = np.asarray(mine.params["d2t"])
    first = own_ids_first(model, ids)
    text = jnp.asarray([[*tokens, *drafts.tolist()]], jnp.int32)
    said, seen = eagle3.passes((first.config, mine.config), mine.params, first.params, text, BACKEND, K)
    np.testing.assert_allclose(seen, whole(first.config, first.params, text, BACKEND)[1], atol=1e-5)
    found = bind(mine.config, mine.params)
    for i in range(K):
        at = length - 2 + i
        own = np.asarray(found.logits(said[:, at : at + 1, i], BACKEND))[0, 0]
        np.testing.assert_allclose(own, logits[i], atol=2e-3, rtol=2e-3)
        assert ids[own.argmax()] == drafts[i]


def test_a_pass_sees_nothing_that_comes_later(target, head):
    (_, model), (mine, _) = target, head
    first = own_ids_first(model, np.asarray(mine.params["d2t"]))
    row = np.random.default_rng(1).integers(5, runs.VOCAB, (1, 12))
    run = jax.jit(lambda row: eagle3.passes((first.config, mine.config), mine.params, first.params, row, BACKEND, K)[0])
    before, changed = np.asarray(run(row)), row.copy()
    changed[0, 8] = 5
    after = np.asarray(run(changed))
    np.testing.assert_allclose(before[:, :7], after[:, :7], atol=1e-5)  # the entry at 7 is of the token at 8
    for i in range(K):
        assert np.abs(before[:, 7, i] - after[:, 7, i]).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"width": 48}, "--width is of a draft model, --method eagle3 has none: leave it out"),
        ({"rare_ids": 3}, "--rare-ids is of a draft model"),
        ({"init_from": "x"}, "--init-from is of a draft model"),
        ({"layers": 2}, "--layers 2, but --method eagle3 has one: leave it out"),
        ({"vocab_size": 400}, "--vocab-size 400 exceeds the target's 320: lower it or leave it out"),
    ],
)
def test_what_it_has_no_use_for_is_refused(root, target, changes, line):
    with pytest.raises(UserError) as stop:
        eagle3.head_config(target[1].config, options(root, "x", **changes))
    assert line in str(stop.value)


def test_options_of_methods(root):
    with pytest.raises(UserError, match="method='hydra' is unknown: use one of draft_model, eagle3"):
        runs.options(root, "x", method="hydra")
    with pytest.raises(UserError, match="--top-n 8: --method eagle3 computes the target in every step"):
        loop.train(options(root, "x", top_n=8))


@pytest.mark.thorough
def test_it_learns_its_target_by_heart(root):
    """Measured by the engine at K = 4, where 5 is the most; its folder speculates for its target."""
    found = loop.train(
        options(root, "whole", steps=320, eval_every=160, learning_rate=1.2e-2, vocab_size=runs.VOCAB, mlp_width=256)
    )
    lengths, losses = journal(found, "acceptance_length"), journal(found, "loss")
    print("acceptance length", lengths, "loss", losses[0], losses[-1])
    assert lengths[0] < 1.5
    assert max(lengths) >= 2.6  # 3.08 where it was written
    assert losses[-1] < 0.3 * losses[0]
    speculative = {"model": str(found), "num_speculative_tokens": K, "adaptive": False}
    texts = np.load(root / "data" / "shard-00000.npz")["tokens"][:4, :8].tolist()
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain, drafted = (
        LLM(str(root / "target"), speculative_config=how, max_model_len=64).generate(prompts, greedy, progress=False)
        for how in (None, speculative)
    )
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in drafted]
    assert np.mean([o.metrics.mean_acceptance_length for o in drafted]) >= 2.3
    files = {path.name for path in found.iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.sha256", "recipe.json", "curves.png"}
    assert json.loads((found / "recipe.json").read_text())["method"] == "eagle3"


@pytest.mark.thorough
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(root, monkeypatch):
    short = {"steps": 20, "eval_every": 10, "eval_tokens": 4}
    expected = state(loop.train(options(root, "once", **short)))
    save = orbax.History.save

    def ended(self, at, *args):
        save(self, at, *args)
        if at == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(orbax.History, "save", ended)
    with pytest.raises(KeyboardInterrupt):
        loop.train(options(root, "twice", **short))
    monkeypatch.undo()
    found = state(loop.train(options(root, "twice", resume=True, **short)))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(x, found[name], err_msg=name)

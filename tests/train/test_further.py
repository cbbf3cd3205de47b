"""Drafts that are trained further: they begin as they were, deeper where asked for, or are refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from jaxspec import UserError
from jaxspec.models.model import Model
from jaxspec.parallel.placement import make_placement
from jaxspec.train import further, loop
from jaxspec.train.methods import implementation
from tests.support.loaded import load_draft
from tests.support.sizes import cases
from tests.train import runs
from tests.train.heads import BACKEND, BY_HEART, SHAPES, K, options
from tests.train.test_train import journal

COUNTS = np.arange(runs.VOCAB)[::-1]
DEEPER = [name for name in SHAPES if name not in ("medusa", "mtp")]  # which have no layers to add to


def begun(root, target, name, draft, **changes):
    asked = options(root, "x", name, init_from="mine", **changes)
    return further.begun(draft, target[1], asked, COUNTS, make_placement())


def proposed(name, draft, target):
    """The hidden states of all passes over a text."""
    batch = {"tokens": jnp.arange(5, 45)[None], "draw": jnp.asarray([3], jnp.uint32)}
    configs = (target[1].config, draft.config)
    passes = jax.jit(lambda draft, first: implementation(name).passes(configs, draft, first, batch, BACKEND, K).hidden)
    return passes(draft.params, target[1].params)


def test_a_head_begins_as_it_was(root, target, head):
    name, mine, folder = head
    back = load_draft(folder, root / "target", model=target[1])
    asked = {"layers": 2} if name == "medusa" else {}
    found = begun(root, target, name, back, **asked)
    assert found.config == mine.config
    for key, x in mine.params.items():
        np.testing.assert_array_equal(found.params[key], x, err_msg=key)


@cases("head", DEEPER, quick=["eagle3"], rest=["dspark", "eagle3 of two layers"], indirect=True)
def test_a_deeper_head_proposes_what_it_did(root, target, head):
    name, mine, _ = head
    more = mine.config.num_layers + 2
    deep = begun(root, target, name, mine, layers=more)
    assert deep.config.num_layers == more == len(deep.config.windows)
    np.testing.assert_allclose(proposed(name, deep, target), proposed(name, mine, target), atol=1e-5)
    last = f"layers.{more - 1}."
    loud = Model(deep.config, deep.params | {last + "down": deep.params[last + "down"] + 0.1})
    assert np.abs(proposed(name, loud, target) - proposed(name, mine, target)).max() > 0.01


@pytest.mark.parametrize(
    ("method", "changes", "config", "line"),
    [
        ("dflash", {}, {}, "--init-from mine is a draft of the method eagle3: give --method eagle3"),
        ("eagle3", {}, {"vocab_size": 300}, "--init-from mine is a draft for 300 ids, the target has 320"),
        ("eagle3", {"mlp_width": 64}, {}, "has mlp_width=96, not --mlp-width 64: leave --mlp-width out"),
        ("eagle3", {"vocab_size": 100}, {}, "has vocab_size=200, not --vocab-size 100"),
        (
            "eagle3",
            {"layers": 1},
            {"num_layers": 2, "windows": (None, None)},
            "has layers=2, not --layers 1",
        ),
        ("eagle3", {}, {"norm_output": True}, "has norm_output=True, and --method eagle3 trains drafts with False"),
        ("eagle3", {}, {"taps": (1, 2, 3)}, "has taps=(1, 2, 3), and --method eagle3 trains drafts with (2, 3, 3)"),
    ],
)
def test_what_is_refused(root, target, method, changes, config, line):
    made = implementation("eagle3").new(
        options(root, "x", "eagle3", **SHAPES["eagle3"]), target[1], COUNTS, make_placement()
    )
    with pytest.raises(UserError) as stop:
        begun(root, target, method, Model(dataclasses.replace(made.config, **config), made.params), **changes)
    assert line in str(stop.value)


@pytest.mark.thorough
def test_a_head_is_trained_further(root):
    long = {"steps": 200, "eval_every": 100, "learning_rate": 1.2e-2, "top_n": 0}
    first = loop.train(options(root, "first", "eagle3", **BY_HEART["eagle3"], **long))
    further = {"init_from": str(first), "layers": 2, "steps": 20, "eval_every": 20, "learning_rate": 1e-4, "top_n": 0}
    deep = loop.train(options(root, "deep", "eagle3", **further))
    # Rounding decides how much is learned: on some CPUs exactly 1.5, on others more. Without training it is 1.
    assert journal(deep, "acceptance_length")[0] == max(journal(first, "acceptance_length")) > 1.3
    assert journal(deep, "loss")[0] < 0.7 * journal(first, "loss")[0]
    source = checkpoints.resolve(str(deep))
    assert source.path == deep

"""Features on disk are what the target computes, and a head learns from them what it learns beside the target."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import UserError
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import bind
from jaxspec.models.model import Model
from jaxspec.models.rows import Rows
from jaxspec.parallel.placement import make_placement
from jaxspec.train import features, loop, preparation
from jaxspec.train import kept as files
from jaxspec.train.data import Rows as TrainingRows
from pallas_kernels.device import CPU
from tests.support import lively_models
from tests.support.sizes import cases
from tests.train import runs
from tests.train.heads import LAYERS, SHAPES, options
from tests.train.test_train import journal

BACKEND = Backend(CPU, None, "reference")
TARGET = lively_models.target()
LENGTH, COUNT, TAPS = 12, 5, (0, 1)
TOKENS = np.random.default_rng(0).integers(0, TARGET.config.vocab_size, (COUNT + 3, LENGTH)).astype(np.uint16)
ROWS = TrainingRows(TOKENS, np.ones(TOKENS.shape, bool))


@cases("dtype", [jnp.float32, jnp.bfloat16], quick=[jnp.bfloat16])
@cases("taps", [TAPS, ()], quick=[TAPS])
def test_they_are_what_the_target_computes(tmp_path, dtype, taps):
    target = Model(TARGET.config, {name: x.astype(dtype) for name, x in TARGET.params.items()})
    how = {"batch_size": 4, "backend": BACKEND, "devices": make_placement()}
    found = features.kept(tmp_path, target, ROWS, COUNT, taps, **how).up_to(COUNT)
    tokens = jnp.asarray(TOKENS[:COUNT], jnp.int32)
    rows = Rows(jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), tokens.shape))
    decoder = bind(target.config, target.params)
    seen, _, tapped = decoder(tokens, (None,) * target.config.num_layers, rows, BACKEND, taps=taps)
    assert found.dtype.names == (("seen", "tapped") if taps else ("seen",))
    assert all(found[name].dtype == dtype for name in found.dtype.names)
    # Passes over 4 and over 5 rows round otherwise.
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == jnp.float32 else {"rtol": 0.05, "atol": 0.1}
    as_numbers = lambda x: np.asarray(x, np.float32)
    np.testing.assert_allclose(as_numbers(found["seen"]), as_numbers(seen), **close)
    for own, theirs in zip(np.split(found["tapped"], len(taps), axis=-1) if taps else (), tapped, strict=True):
        np.testing.assert_allclose(as_numbers(own), as_numbers(theirs), **close)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == COUNT * LENGTH * (1 + len(taps)) * target.config.width * jnp.dtype(dtype).itemsize


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("features")
    runs.write(path, layers=LAYERS)
    return path


@cases("method", ["eagle3", "medusa", "mtp", "dflash"], rest=["eagle3"])
def test_a_head_learns_the_same_from_them(root, method, capsys):
    short = SHAPES[method] | {"steps": 10, "eval_every": 10, "eval_tokens": 4}
    found = [
        loop.train(options(root, f"{method}-{keeps}", method, keep_features=keeps, **short)) for keeps in (False, True)
    ]
    said = capsys.readouterr().err
    assert said.count("what the target computes of 4,032 tokens") == 1
    assert "GB in " in said
    beside, read = (journal(path, "loss") for path in found)
    np.testing.assert_allclose(beside, read, rtol=1e-3)
    assert beside[-1] < beside[0] or len(beside) == 1


def test_where_they_cannot_be_kept(root, monkeypatch):
    with pytest.raises(UserError, match="--keep-features, but --method draft_model reads none: leave it out"):
        preparation.prepare(runs.options(root, "x", keep_features=True))
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1}))
    prepared = preparation.prepare(options(root, "x", "mtp", keep_features=True, seed=9))  # rows of its own
    with pytest.raises(UserError, match=r"GB more, 0\.0 are free: leave --keep-features out or lower --steps"):
        preparation.teacher(prepared)

"""What the target says is kept: the right ids in the right rows, whatever ended or went before."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.models.decoder import whole
from jaxspec.models.model import Model
from jaxspec.parallel.placement import make_placement
from jaxspec.train import kept as files
from jaxspec.train.data import Rows
from jaxspec.train.kept import digest
from jaxspec.train.top_tokens import kept, top
from pallas_kernels.device import CPU
from tests.support import exact, lively_models

BACKEND = Backend(CPU, None, "reference")
TARGET = lively_models.target()
V, LENGTH, COUNT, N = TARGET.config.vocab_size, 12, 21, 5
TOKENS = np.random.default_rng(0).integers(0, V, (COUNT + 3, LENGTH)).astype(np.uint16)
ROWS = Rows(TOKENS, np.ones(TOKENS.shape, bool))


def fill(folder, *, target=TARGET, rows=ROWS, count=COUNT, n=N):
    return records(folder, target=target, rows=rows, count=count, n=n).up_to(count)


def records(folder, *, target=TARGET, rows=ROWS, count=COUNT, n=N):
    return kept(folder, target, rows, count, n, batch_size=8, backend=BACKEND, devices=make_placement(8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept")
    fill(path)
    return path


def only(folder):
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("n", [1, 3, 16, 17, 60, 100])
def test_top_is_a_sort(n):
    logits = np.random.default_rng(n).standard_normal((2, 3, 100)).astype(np.float32)
    logits[0, 0] = np.arange(100)  # all in a few groups
    logits[0, 1] = -logits[0, 0]
    logits[1, 0, ::16] += 9
    ids, log_p = jax.jit(lambda x: top(x, n))(logits)
    order = np.argsort(-logits, axis=-1)[..., :n]
    np.testing.assert_array_equal(ids, order)
    expected = np.log(np.take_along_axis(exact.softmax(logits.astype(np.float64)), order, axis=-1))
    np.testing.assert_allclose(log_p, expected, atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_top_lowers_for_accelerators(platform):
    logits = jax.ShapeDtypeStruct((2, 3, 49152), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: top(x, 64)), platforms=[platform])(logits)
    assert [x.shape for x in exported.out_avals] == [(2, 3, 64)] * 2


def test_what_is_kept_is_what_the_target_says(folder):
    """Of every row, though the last batch is not full, and over eight devices."""
    found = fill(folder)
    assert found.shape == (COUNT,)
    assert (found["ids"].dtype, found["log_p"].dtype) == (np.uint16, np.float16)
    decoder, hidden = whole(TARGET.config, TARGET.params, jnp.asarray(TOKENS[:COUNT], jnp.int32), BACKEND)
    p = exact.softmax(np.asarray(decoder.logits(hidden, BACKEND), np.float64))
    order = np.argsort(-p, axis=-1)[..., :N]
    assert np.mean(found["ids"] == order) > 0.999
    np.testing.assert_allclose(found["log_p"], np.log(np.take_along_axis(p, order, axis=-1)), rtol=1e-3, atol=1e-4)
    assert only(folder).stat().st_size == COUNT * LENGTH * N * 4


def test_a_second_run_asks_the_target_nothing(folder, monkeypatch, capsys):
    before = fill(folder).tobytes()
    monkeypatch.setattr(files, "ahead", None)
    assert fill(folder).tobytes() == before
    assert fill(folder, count=3).tobytes() == before[: 3 * LENGTH * N * 4]
    said = capsys.readouterr().err.splitlines()
    assert f"the target's 5 most probable ids of 252 tokens: 0.00 GB in {only(folder)} (found there)" in said


@pytest.mark.parametrize("size", [0, 1, 7 * LENGTH * N * 4 + 11, 16 * LENGTH * N * 4])
def test_goes_on_where_it_was_ended(folder, tmp_path, size):
    """Also in the middle of a row, and after a run that needed fewer rows."""
    whole_file = only(folder)
    (tmp_path / whole_file.name).write_bytes(whole_file.read_bytes()[:size])
    fill(tmp_path)
    mine, theirs = (np.frombuffer(path.read_bytes(), np.uint16) for path in (only(tmp_path), whole_file))
    assert mine.size == theirs.size
    assert np.mean(mine != theirs) < 1e-3  # batches begin at other rows


def test_an_interrupt_keeps_what_is_done(folder, tmp_path, monkeypatch):
    class Stops:
        def __init__(self):
            self.left = 2

        def __call__(self, answer):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return answer

    stops, real = Stops(), jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: stops(real(x)))
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path)
    assert only(tmp_path).stat().st_size == 16 * LENGTH * N * 4
    monkeypatch.undo()
    assert fill(tmp_path).tobytes() == fill(folder).tobytes()


def test_only_what_is_needed_is_found(folder, tmp_path):
    """A batch at a time, and no more once it is over."""
    some, row = records(tmp_path), LENGTH * N * 4
    assert len(some.up_to(0)) == len(list(tmp_path.iterdir())) == 0
    assert len(some.up_to(3)) == 3
    assert only(tmp_path).stat().st_size == 8 * row
    late = iter([False, True])
    assert len(some.up_to(COUNT, lambda seconds: next(late, True))) == 16
    assert len(some.up_to(COUNT, lambda seconds: True)) == 16
    assert some.up_to(COUNT).tobytes() == some.known.tobytes() == fill(folder).tobytes()


def test_what_differs_is_found_anew(folder):
    """Another target, other rows or another n have a file of their own."""
    name = "layers.1.down"
    other = Model(TARGET.config, {**TARGET.params, name: TARGET.params[name] + 0.1})
    changed = TOKENS.copy()
    changed[20, 3] += 1
    shorter = Rows(TOKENS[:, :6].reshape(-1, 6), ROWS.mask[:, :6])
    names = {digest(target, rows) for target in (TARGET, other) for rows in (ROWS, shorter)}
    names.add(digest(TARGET, dataclasses.replace(ROWS, tokens=changed)))
    assert len(names) == 5
    assert digest(TARGET, Rows(TOKENS.copy(), ROWS.mask)) in names


def test_a_full_disk_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ValueError, match=r"needs 0.0 GB more, 0.0 are free: lower --top-n or --steps"):
        fill(tmp_path)

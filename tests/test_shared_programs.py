"""Programs that engines of a test process share, and those that they must not share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decode import round as decode_round
from jaxspec.engine.engine import Engine
from tests.support.shared_programs import MOST, Shared

X = jnp.zeros(3)


@pytest.fixture
def made():
    """Return (a store of its own, the names of the programs that it made)."""
    store, names = Shared(), []
    store.lower = lambda name, *arguments: names.append(name)
    return store, names


def test_a_program_is_made_once_for_each_form(made):
    store, names = made
    first = store("launch", None, {"w": X}, X, X)
    assert store("launch", None, {"w": X + 1}, X, X) is first
    store("prefill", None, {"w": X}, X, X)
    store("launch", "another", {"w": X}, X, X)
    store("launch", None, {"v": X}, X, X)
    store("launch", None, {"w": X[:2]}, X, X)
    with jax.default_matmul_precision("highest"):
        store("launch", None, {"w": X}, X, X)
    assert names == ["launch", "prefill", *["launch"] * 4]


def test_nothing_is_shared_while_something_is_patched(made, monkeypatch):
    """A program from before would hide what the test patches, and one from then would spoil later tests."""
    store, names = made
    store("launch", None, X, X, X)
    monkeypatch.setattr(decode_round, "propose", None)
    store("launch", None, X, X, X)
    store("launch", None, X, X, X)
    assert len(names) == 3
    monkeypatch.undo()
    store("launch", None, X, X, X)
    assert len(names) == 3


def test_what_no_program_holds_may_be_patched(made, monkeypatch):
    store, names = made
    monkeypatch.setattr(object.__new__(Engine), "step", None, raising=False)
    for _ in range(2):
        store("launch", None, X, X, X)
    assert len(names) == 1


def test_the_oldest_are_forgotten(made):
    store, names = made
    for i in (*range(MOST + 1), 1, 0):
        store("launch", i, X, X, X)
    assert len(names) == MOST + 2
    store.cache_clear()
    store("launch", 1, X, X, X)
    assert len(names) == MOST + 3

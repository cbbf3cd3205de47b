"""Heads' files, damaged at random, and tensors of every wrong shape: a head is read, or one short line says why not."""

from __future__ import annotations

import functools
import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load_file, save_file

from checkpoints import safetensors
from jaxspec.common.errors import UserError
from jaxspec.models.model import Model
from tests.checkpoints.files import assert_same
from tests.checkpoints.test_mutations import mutated_bytes, mutated_json, reads_or_says_why, steady
from tests.drafters.references import mtp
from tests.drafters.test_formats import METHODS, TARGET, parameters
from tests.support.loaded import load, load_draft
from tests.support.model_folders import write_model
from tests.support.sizes import cases

DTYPE = np.dtype("float32")
QUICK = ["eagle3 by speculators", "medusa"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mutations") / "target", layers=TARGET.layers)


def written(name: str, folder: Path) -> Path:
    """Its one file of tensors."""
    reference, options = METHODS[name]
    reference.write(folder, seed=0, target=TARGET, **options)
    (file,) = folder.glob("*.safetensors")
    return file


def read(name: str, folder: Path, target: Path) -> None:
    method = "mtp" if METHODS[name][0] is mtp else None
    load_draft(folder, target, method, model=loaded(target), dtype=DTYPE)


@functools.cache
def loaded(target: Path) -> Model:
    return load(target, DTYPE)


@cases("name", METHODS, quick=QUICK)
def test_config_json_and_header(name, target, tmp_path):
    file, config = written(name, tmp_path), tmp_path / "config.json"
    raw, data = json.loads(config.read_text()), file.read_bytes()

    @steady(max_examples=60)
    @given(mutated_json(raw))
    def mutate(text):
        config.write_text(text)
        with reads_or_says_why():
            read(name, tmp_path, target)

    @steady(max_examples=40)
    @given(mutated_bytes(data, 8 + struct.unpack_from("<Q", data)[0]))
    def mutate_header(damaged):
        file.write_bytes(damaged)
        with reads_or_says_why():
            read(name, tmp_path, target)

    mutate()
    config.write_text(json.dumps(raw))
    mutate_header()


# Of a tensor that is in the file -> what stands there instead. Nothing of it is always wrong.
WRONG = {
    "no numbers": lambda x: x[:0],
    "no axes": lambda x: x.reshape(-1)[0],
    "turned": lambda x: x.T if x.ndim == 2 else x[None],
    "one row less": lambda x: x[:-1],
    "whole numbers": lambda x: x.astype(np.int8),
}


@cases("name", METHODS, quick=QUICK)
def test_tensors_of_wrong_shapes(name, target, tmp_path):
    file = written(name, tmp_path)
    tensors = load_file(file)
    for tensor, x in tensors.items():
        for how, wrong in WRONG.items():
            save_file(tensors | {tensor: np.array(wrong(x), order="C")}, file)
            with reads_or_says_why():
                read(name, tmp_path, target)
            if how == "no numbers" and name == "eagle3 by speculators":
                with pytest.raises(UserError):
                    read(name, tmp_path, target)


@pytest.mark.parametrize("kind", [[], {}, ["eagle3"]])
def test_a_kind_of_model_that_is_no_name(kind, target, tmp_path):
    written("eagle3", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": kind}))
    read("eagle3", tmp_path, target)


def test_an_interrupt_while_it_is_read(target, tmp_path, monkeypatch):
    """Wherever it comes, what is read next is whole."""
    written("eagle3", tmp_path)
    whole = parameters(tmp_path, target)
    right, calls = safetensors.Shards.read, itertools.count()
    for at in range(len(whole)):
        begun = next(calls)

        def interrupted(self, *arguments, last=begun + 1 + at):
            if next(calls) == last:
                raise KeyboardInterrupt
            return right(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(safetensors.Shards, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                parameters(tmp_path, target)
        assert_same(parameters(tmp_path, target), whole)

"""Widened weights on disk: the same numbers as from the model's own file, in whatever state the copy is."""

from __future__ import annotations

import os
import stat

import gguf
import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import checkpoints
from jaxspec.loading import dequantised
from jaxspec.loading.resolved import resolved
from jaxspec.loading.weights import load
from jaxspec.models.backend import Backend
from jaxspec.models.storage import narrow
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import here
from pallas_kernels.weights.output_first import Streamed
from tests.checkpoints.files import write_gguf
from tests.support.full_disk import files_end_at

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU's weights are kept")


@pytest.fixture
def source(tmp_path):
    return checkpoints.resolve(str(write_gguf(tmp_path / "model.gguf", "llama2", gguf.GGMLQuantizationType.Q8_0)))


class Asked:
    """Loads, and counts how often."""

    def __init__(self, source, folder, dtype="float32", devices=1) -> None:
        self.count, self.source, self.folder, self.dtype = 0, source, folder, np.dtype(dtype)
        self.mesh = make_placement(devices)
        self.backend = Backend(here(), self.mesh)

    def load(self):
        self.count += 1
        return load(resolved(self.source), self.dtype, self.mesh).stored_for(self.backend)

    def __call__(self):
        return dequantised.load_dequantised(
            resolved(self.source), self.dtype, self.backend, self.mesh, self.folder, self.load
        )


def same(a, b) -> bool:
    """To the last bit, and to a program: numbers, order, and where they lie."""
    pairs = list(zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True))
    return (
        jax.tree.structure(a.params) == jax.tree.structure(b.params)
        and all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)
        and all((x.sharding, x.format) == (y.sharding, y.format) for x, y in pairs)
        and a.config == b.config
    )


def test_the_second_time_it_comes_from_the_copy(source, tmp_path):
    asked = Asked(source, tmp_path / "kept")
    first, second = asked(), asked()
    assert asked.count == 1
    assert isinstance(second.params["layers.0.qkv"], Streamed)
    assert same(first, second)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "a folder"])
def test_a_damaged_copy_is_made_anew(source, tmp_path, damage):
    asked = Asked(source, tmp_path / "kept")
    first = asked()
    (copy,) = asked.folder.iterdir()
    whole = copy.read_bytes()
    copy.unlink()
    if damage == "a folder":
        copy.mkdir()
    else:
        copy.write_bytes({"cut": whole[:-50], "empty": b"", "text": b"no numbers"}[damage])
    assert same(asked(), first)
    assert asked.count == 2
    assert same(asked(), first)
    assert asked.count == (3 if damage == "a folder" else 2)


@pytest.mark.parametrize("how", ["a link", "can be written by others"])
def test_a_copy_that_another_user_can_have_written_is_made_anew(source, tmp_path, how):
    asked = Asked(source, tmp_path / "kept")
    first = asked()
    (copy,) = asked.folder.iterdir()
    plant(copy, how)
    assert same(asked(), first)
    assert asked.count == 2
    assert stat.S_IMODE(copy.lstat().st_mode) == 0o600
    assert same(asked(), first)
    assert asked.count == 2


def plant(copy, how) -> None:
    """Other weights in the copy's place, whole and of the same file."""
    with safe_open(copy, framework="numpy") as file:
        arrays, metadata = {name: file.get_tensor(name) + 1 for name in file.keys()}, file.metadata()  # noqa: SIM118
    if how == "a link":
        copy.unlink()
        copy.symlink_to(copy.parent.parent / "planted")
    save_file(arrays, copy.resolve(), metadata=metadata)
    copy.resolve().chmod(0o600 if how == "a link" else 0o666)


def test_on_a_full_disk_it_loads(source, tmp_path):
    asked = Asked(source, tmp_path / "kept")
    with files_end_at(5000):
        first = asked()
    assert not list(asked.folder.iterdir())
    assert same(asked(), first)


def test_another_file_of_the_name_is_read(source, tmp_path):
    asked = Asked(source, tmp_path / "kept")
    asked()
    write_gguf(source.path, "llama2", gguf.GGMLQuantizationType.F32)
    os.utime(source.path, ns=(1, 1))
    second = asked()
    assert asked.count == 2
    assert same(asked(), second)
    assert (asked.count, len(list(asked.folder.iterdir()))) == (2, 1), "one copy a file"


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"devices": 2}])
def test_what_is_read_otherwise_is_not_kept(source, tmp_path, options):
    asked = Asked(source, tmp_path / "kept", **options)
    asked()
    assert not asked.folder.exists()


def test_what_bfloat16_holds_is_not_kept(tmp_path):
    """The file itself is no larger."""
    path = write_gguf(tmp_path / "model.gguf", "llama2", gguf.GGMLQuantizationType.BF16)
    asked = Asked(checkpoints.resolve(str(path)), tmp_path / "kept")
    assert narrow(asked().params)
    assert same(asked(), asked())
    assert not asked.folder.exists()


def test_large_models_are_not_kept(source, tmp_path, monkeypatch):
    monkeypatch.setattr(dequantised, "LARGEST", 1000)
    asked = Asked(source, tmp_path / "kept")
    asked()
    assert not asked.folder.exists()


def test_where_nothing_can_be_written_it_loads(source, tmp_path):
    (tmp_path / "kept").write_text("")
    asked = Asked(source, tmp_path / "kept")
    assert same(asked(), asked())
    assert asked.count == 2

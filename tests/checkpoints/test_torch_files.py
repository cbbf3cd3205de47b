"""What torch.save wrote: the same numbers as from safetensors, nothing run, and refused in one line without torch."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints
from checkpoints import head_folders, safetensors, sources
from checkpoints.torch_files import TorchFile
from jaxspec.loading.convert import convert
from tests.checkpoints.files import assert_same, fails, load
from tests.drafters.references import medusa
from tests.drafters.references.common import Shape
from tests.golden.families import FOLDER

oracle = pytest.mark.oracle


def tensors_of(folder: Path) -> dict:
    torch = pytest.importorskip("torch")
    file = next(path for path in folder.glob("*.safetensors") if path.name != "expected.safetensors")
    return {name: torch.from_numpy(x.copy()) for name, x in load_file(file).items()}


def medusa_heads(folder: Path) -> dict:
    """A head's folder without its tensors, which are returned."""
    medusa.write(folder, seed=0, target=Shape(), heads=3)
    tensors = tensors_of(folder)
    (folder / "medusa_lm_head.safetensors").unlink()
    return tensors


def save(tensors, path: Path, **options) -> None:
    pytest.importorskip("torch").save(tensors, path, **options)


def whole(file, name: str) -> np.ndarray:
    part = file.get_slice(name)
    return part[(slice(None),) * len(part.get_shape())]


@oracle
def test_a_model_in_one_file_and_in_shards(tmp_path):
    """Llama's, as a folder held it before there was safetensors."""
    _, wanted = load(FOLDER / "llama2")
    tensors = tensors_of(FOLDER / "llama2")
    for place in ("one", "shards"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_bytes((FOLDER / "llama2" / "config.json").read_bytes())
    save(tensors, tmp_path / "one" / "pytorch_model.bin")
    names = sorted(tensors)
    where = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(where.values()):
        save({name: tensors[name] for name in names if where[name] == file}, tmp_path / "shards" / file)
    index = tmp_path / "shards" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    for place in ("one", "shards"):
        assert_same(load(tmp_path / place)[1], wanted)
    index.write_text(json.dumps({"weight_map": where | {names[0]: "../evil.bin"}}))
    with fails(ValueError, "'../evil.bin'", ".bin file in the same folder"):
        load(tmp_path / "shards")


@oracle
@pytest.mark.parametrize("form", ["zip", "old", "nested", "parameters"])
def test_forms(form, tmp_path):
    """As torch writes today and once did, within what a training saves, and as parameters that want gradients."""
    torch = pytest.importorskip("torch")
    tensors = medusa_heads(tmp_path)
    saved = {
        "nested": {"epoch": 3, "state_dict": tensors},
        "parameters": {name: torch.nn.Parameter(x) for name, x in tensors.items()},
    }
    path = tmp_path / "medusa_lm_head.pt"
    save(saved.get(form, tensors), path, _use_new_zipfile_serialization=form != "old")
    file = TorchFile(path)
    assert set(file.keys()) == set(tensors)
    for name, x in tensors.items():
        np.testing.assert_array_equal(whole(file, name), x.numpy())
        np.testing.assert_array_equal(file.get_slice(name)[1:3], x[1:3].numpy())


@oracle
def test_dtypes_and_tensors_that_share(tmp_path):
    torch = pytest.importorskip("torch")
    path, x = tmp_path / "pytorch_model.bin", torch.arange(12.0).reshape(3, 4)
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "BOOL": torch.bool, "I32": torch.int32}
    tensors = {name: x.to(kind) for name, kind in kinds.items()} | {"F32": x, "same": x, "turned": x.T, "row": x[1]}
    save(tensors | {"uint8": x.to(torch.uint8)}, path)
    file = TorchFile(path)
    for name in kinds:
        assert file.get_slice(name).get_dtype() == name
        np.testing.assert_array_equal(whole(file, name).astype(np.float32), tensors[name].float().numpy())
    assert whole(file, "BF16").dtype == jnp.bfloat16
    for name in ("F32", "same", "turned", "row"):
        np.testing.assert_array_equal(whole(file, name), tensors[name].numpy())
    assert file.get_slice("BF16")[1:, 2:].tolist() == [[6, 7], [10, 11]]
    with fails(NotImplementedError, "uint8", "is stored as"):
        safetensors.Shards(tmp_path).dtype("uint8")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


REFUSED = {
    "code": (lambda torch: {"w": torch.ones(2), "evil": Evil()}, "nothing else is unpickled"),
    "no names": (lambda torch: [torch.ones(2)], "holds no tensors by name"),
    "nothing": (lambda torch: {}, "holds no tensors by name"),
    "no tensor": (lambda torch: {"w": torch.ones(2), "steps": 5}, "'steps' is no tensor, but int"),
    "no string": (lambda torch: {3: torch.ones(2)}, "3 is no tensor, but Tensor"),
    "sparse": (lambda torch: {"w": torch.eye(3).to_sparse()}, "tensor w is sparse"),
    "twice as wide": (lambda torch: {"w": torch.ones(2).double()}, "stored as float64"),
}


@oracle
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("old", [False, True])
def test_what_is_refused(case, old, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, message = REFUSED[case]
    save(make(pytest.importorskip("torch")), Path("pytorch_model.bin"), _use_new_zipfile_serialization=not old)
    with fails((ValueError, NotImplementedError), message):
        safetensors.Shards(Path(".")).dtype("w")
    assert not Path("ran").exists()


@oracle
@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"PK\x03\x04" + bytes(60), b"half"], ids=range(4))
def test_damaged(data, tmp_path):
    pytest.importorskip("torch")  # which is what says so
    path = tmp_path / "pytorch_model.bin"
    if data == b"half":
        save(medusa_heads(tmp_path / "whole"), path)
        data = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(data)
    with fails((ValueError, OSError), str(path), "again"):
        TorchFile(path)


def test_without_torch(tmp_path, monkeypatch):
    """Or with one whose loader of tensors alone is not."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"anything")
    remedy = "install torch, or convert it once with `jaxspec convert` where torch is"
    monkeypatch.setitem(sys.modules, "torch", None)
    with fails(NotImplementedError, str(path), "torch only, which is not installed", remedy):
        head_folders.contents(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.5.1+cpu"))
    with fails(NotImplementedError, str(path), "torch 2.6 or later only, found 2.5.1+cpu", remedy):
        head_folders.contents(tmp_path)


@oracle
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_head_is_converted_once(dtype, tmp_path, monkeypatch):
    tensors = medusa_heads(tmp_path / "head") | {"token_map": pytest.importorskip("torch").arange(48)}
    save(tensors, tmp_path / "head" / "medusa_lm_head.pt")
    assert convert(str(tmp_path / "head"), tmp_path / "new", dtype=dtype) == tmp_path / "new"
    monkeypatch.setitem(sys.modules, "torch", None)
    config, shapes = head_folders.contents(tmp_path / "new")
    assert config == json.loads((tmp_path / "head" / "config.json").read_text())
    assert shapes == {name: tuple(x.shape) for name, x in tensors.items()}
    found = load_file(tmp_path / "new" / "model.safetensors")
    for name, x in tensors.items():
        kept = name == "token_map" or dtype is None
        np.testing.assert_array_equal(found[name], x.numpy() if kept else x.numpy().astype(jnp.dtype(dtype)))
    with fails(FileExistsError, "not empty"):
        convert(str(tmp_path / "head"), tmp_path / "new")


def test_only_the_preferred_format_is_fetched():
    head, shards = "medusa_lm_head.pt", "pytorch_model-00001-of-00002.bin"
    both = ["config.json", shards, "original/x.safetensors", head]
    assert sources.weight_files(both) == ["pytorch_model*.bin", head]
    assert sources.weight_files([*both, "medusa_lm_head.safetensors"]) == ["*.safetensors"]
    assert sources.weight_files([]) == ["*.safetensors"]


def test_a_folder_of_tensors_alone(tmp_path):
    for name in ("medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"):
        (tmp_path / name).mkdir()
        with fails(ValueError, "no checkpoint"):
            checkpoints.resolve(str(tmp_path / name))
        (tmp_path / name / name).write_bytes(b"x")
        assert checkpoints.resolve(str(tmp_path / name)).kind == "hf"

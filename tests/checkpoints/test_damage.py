"""Damaged and absurd folders, tokenizers and names that are none: one line that says which, and no code is run."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoints
from checkpoints import orbax, reading, safetensors
from tests.checkpoints.files import fails, hf, load, rewrite, shard, write_gguf
from tests.golden.families import FOLDER
from tests.support import tiny_models
from tests.support.model_folders import write_tokenizer

# Shards


def write_index(folder: Path, raw) -> Path:
    (folder / safetensors.INDEX).write_text(json.dumps(raw))
    return folder


OUTSIDE = ["../model.safetensors", "/etc/model.safetensors", "..", "a/b.safetensors", "a\\b.safetensors"]
NO_SHARDS = ["", 5, None, ["x"], "x\0.safetensors", "config.json", "x.safetensors/"]


@pytest.mark.parametrize("name", OUTSIDE + NO_SHARDS, ids=str)
def test_shards_stay_in_their_folder(name, tmp_path):
    rewrite(tmp_path, "llama2")  # what ../model.safetensors leads to
    inside = shard(tmp_path / "inside", "llama2")
    raw = json.loads((inside / safetensors.INDEX).read_text())
    raw["weight_map"]["lm_head.weight"] = name
    with fails(ValueError, str(inside / safetensors.INDEX), repr(name), "same folder"):
        load(write_index(inside, raw))


@pytest.mark.parametrize("raw", [{}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": 5}])
def test_an_index_without_its_map(raw, tmp_path):
    with fails(ValueError, safetensors.INDEX, "weight_map"):
        load(write_index(shard(tmp_path, "llama2"), raw))


def test_the_hubs_links_are_followed(tmp_path):
    """Its cache's snapshots are links to files elsewhere."""
    blobs, snapshot = shard(tmp_path / "blobs", "llama2"), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    load(snapshot)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"\xff" * 64,
    ],
    ids=range(7),
)
def test_a_damaged_safetensors_file(data, tmp_path):
    (rewrite(tmp_path, "llama2") / "model.safetensors").write_bytes(data)
    with fails(ValueError, str(tmp_path)):
        load(tmp_path)
    with fails(ValueError, str(tmp_path)):
        safetensors.stored_dtype(tmp_path)


def test_a_safetensors_file_that_is_a_folder(tmp_path):
    rewrite(tmp_path, "llama2")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with fails(OSError, "model.safetensors"):
        load(tmp_path)


# Tokenizers


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "5", '"x"', "", "{", "[" * 100_000, '{"eos_token": 5}'])
def test_a_damaged_tokenizer(name, text, tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    with fails(ValueError, str(tmp_path)):
        checkpoints.load_tokenizer(hf(tmp_path))


def test_a_class_of_tokenizer_that_does_not_exist(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with fails((ValueError, OSError), str(tmp_path)):
        checkpoints.load_tokenizer(hf(tmp_path))


EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Tokenizer: pass\n"


def test_no_checkpoints_code_is_run_nor_asked_about(tmp_path):
    """In a process of its own, whose input says yes to everything."""
    write_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"], "AutoConfig": "evil.Tokenizer"}
    settings = {"tokenizer_class": "EvilTokenizer", "auto_map": auto_map}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    rewrite(tmp_path, "llama2", auto_map=auto_map)
    code = (
        f"import checkpoints; source = checkpoints.resolve({str(tmp_path)!r})\n"
        "print(checkpoints.load_config(source).family)\n"
        "try: checkpoints.load_tokenizer(source)\n"
        "except NotImplementedError as error: print(error)\n"
        "print(input())"
    )
    run = subprocess.run([sys.executable, "-c", code], input="y\n", capture_output=True, text=True, timeout=300)
    family, refusal, left = run.stdout.splitlines()
    assert (family, left) == ("llama", "y"), run.stderr
    assert str(tmp_path) in refusal
    assert "custom code, which jaxspec does not run" in refusal
    assert not (tmp_path / "ran").exists()


# orbax folders


ABSURD = (
    *({"rope": 5}, {"rope": None}, {"rope": {"theta": 1e4, "factors": 3}}, {"rope": {"theta": "x", "factors": []}}),
    *({"windows": None}, {"windows": [0, 0]}, {"windows": ["x", None]}, {"eos_ids": 2}, {"eos_ids": [2**31]}),
    *({"num_heads": 0}, {"num_layers": 10**8}, {"tied": 1}, {"activation": "relu"}, {"family": ["llama"]}),
    *({"norm_eps": float("nan")}, {"query_scale": -1.0}, {"local_rope": []}, {"embed_width": 0}, {"head_dim": None}),
)


@pytest.mark.parametrize("change", ABSURD, ids=str)
def test_a_jaxspec_json_with_absurd_values(change, tmp_path):
    path = tmp_path / orbax.CONFIG_FILE
    path.write_text(json.dumps(tiny_models.BASE.to_json() | change))
    kind = NotImplementedError if "family" in change else ValueError
    with fails(kind, str(path)):
        checkpoints.load_config(checkpoints.resolve(str(tmp_path)))


def test_damaged_arrays(tmp_path):
    config, params = load(FOLDER / "llama2")
    checkpoints.save(tmp_path / "ckpt", params, config)
    for path in (tmp_path / "ckpt" / orbax.PARAMS).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    with fails((ValueError, OSError), str(tmp_path / "ckpt" / orbax.PARAMS)):
        load(tmp_path / "ckpt")


@pytest.mark.parametrize("data", [b"\xff\xff", b"", b"two\nlines"])
def test_a_damaged_fingerprint(data, tmp_path):
    (tmp_path / orbax.FINGERPRINT).write_bytes(data)
    with fails(ValueError, orbax.FINGERPRINT):
        checkpoints.load_fingerprint(checkpoints.Source("orbax", tmp_path, "draft"))


# Names


@pytest.mark.parametrize("model", [5, None, True, b"x", ["a"], "", "  ", "a\0b", "/a\nb", "x" * 5000], ids=repr)
def test_names_of_models_that_are_none(model):
    with fails(ValueError, "model=", "1..4096"):
        checkpoints.resolve(model)


@pytest.mark.parametrize("revision", [5, "", "a\nb", ["main"]], ids=repr)
def test_revisions_that_are_none(revision):
    with fails(ValueError, "revision=", "1..4096"):
        checkpoints.resolve("org/model", revision)


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    with fails(ValueError, "x.gguf", "no checkpoint"):
        checkpoints.resolve(str(tmp_path / "x.gguf"))
    with fails(FileNotFoundError, "~no-such-user/x"):
        checkpoints.resolve("~no-such-user/x")
    with fails(ValueError, "'org/..'", "not a hub id"):
        checkpoints.resolve("org/..")
    with fails(OSError, "too long"):
        checkpoints.resolve("x" * 300 + "/y")
    assert checkpoints.resolve(write_gguf(tmp_path / "m.gguf", "llama2")).name == "m"  # a Path is a name too


def test_errors_of_the_library_that_fetches(monkeypatch):
    import huggingface_hub

    def break_off(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", break_off)
    with fails(ConnectionError, "org/model", "give the folder's path"):
        checkpoints.resolve("org/model")


def test_an_interrupt_stays_one(tmp_path):
    """Even one that comes while an import makes a class, which Python 3.11 turns into a RuntimeError."""

    class Interrupted:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reading.naming_file(tmp_path):
        type("Made", (), {"field": Interrupted()})

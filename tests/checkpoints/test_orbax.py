"""Self-contained folders: what goes in comes out, and nothing half-written is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import head_folders, orbax
from jaxspec.common.errors import DiskError
from jaxspec.loading.convert import convert
from jaxspec.models.decoder import abstract_params, parameters
from jaxspec.parallel.placement import make_placement
from tests.checkpoints.files import assert_same, fails, load, write_gguf
from tests.checkpoints.test_gguf_tokenizer import TEXTS, byte_level_meta
from tests.golden.families import FAMILIES, FOLDER
from tests.support import tiny_models
from tests.support.full_disk import SAYS, files_end_at


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, tmp_path):
    config, params = load(FOLDER / family)
    checkpoints.save(tmp_path / "new" / "ckpt", params, config)
    devices = 1 if family in ("gemma3", "gemma4_dense") else 2  # these have a layer with one key-value head
    again, restored = load(tmp_path / "new" / "ckpt", devices=devices)
    assert again == config
    assert hash(again) == hash(config)
    assert_same(restored, params)
    assert len(restored["layers.0.qkv"].sharding.device_set) == devices
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["ckpt"]


def test_restored_in_the_wanted_dtype(tmp_path):
    config, params = load(FOLDER / "qwen2")
    checkpoints.save(tmp_path / "ckpt", params, config)
    _, restored = load(tmp_path / "ckpt", "bfloat16")
    assert restored["embed"].dtype == jnp.bfloat16
    assert restored["norm"].dtype == jnp.float32
    np.testing.assert_array_equal(restored["embed"], params["embed"].astype(jnp.bfloat16))


def test_a_reduced_vocabulary_stays_with_the_draft(tmp_path):
    config = dataclasses.replace(tiny_models.BASE, tied=False, reduced_vocab_size=24)
    params = tiny_models.model(config).params
    stored = {name: params[name].astype(p.dtype) for name, p in parameters(config, "bfloat16").items()}
    checkpoints.save(tmp_path / "ckpt", stored, config)
    again, restored = load(tmp_path / "ckpt", devices=2)
    assert again == config
    for name in ("d2t", "t2d"):
        assert restored[name].dtype == jnp.int32
        np.testing.assert_array_equal(restored[name], params[name])
    np.testing.assert_allclose(restored["embed"], params["embed"], rtol=0.01)


def test_a_gguf_file_becomes_a_folder_with_everything(tmp_path):
    meta = byte_level_meta("qwen2") | {"chat_template": "{{ messages[0].content }}"}
    path = write_gguf(tmp_path / "m.gguf", "llama3", tokenizer=meta)
    convert(str(path), tmp_path / "ckpt")
    path.unlink()  # nothing may lean on the original
    source = checkpoints.resolve(str(tmp_path / "ckpt"))
    assert source.kind == "orbax"
    tokenizer, config = checkpoints.load_tokenizer(source), checkpoints.load_config(source)
    assert config.eos_ids == (2, 5)
    assert checkpoints.load_stop_ids(source, tokenizer) == (2, 5)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    write_gguf(path, "llama3", tokenizer=meta)
    assert_same(load(tmp_path / "ckpt")[1], load(path)[1])
    theirs = checkpoints.load_tokenizer(checkpoints.resolve(str(path)))
    assert [tokenizer.encode(t) for t in TEXTS] == [theirs.encode(t) for t in TEXTS]


@pytest.mark.parametrize(("dtype", "stored"), [(None, "float16"), ("bfloat16", "bfloat16")])
def test_a_hugging_face_folder_keeps_its_dtype(dtype, stored, tmp_path):
    folder = tmp_path / "hf"
    checkpoints.load_tokenizer(
        checkpoints.resolve(str(write_gguf(tmp_path / "m.gguf", "llama2", tokenizer=byte_level_meta("qwen2"))))
    ).save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((FOLDER / "mistral" / name).read_bytes())
    convert(str(folder), tmp_path / "ckpt", dtype=dtype)
    assert orbax.stored_dtype(tmp_path / "ckpt") == stored
    assert load(tmp_path / "ckpt")[0].windows == (20, 20)
    if dtype is None:
        assert_same(load(tmp_path / "ckpt")[1], load(folder)[1])
    convert(str(tmp_path / "ckpt"), tmp_path / "again")  # orbax in, orbax out
    assert_same(load(tmp_path / "again")[1], load(tmp_path / "ckpt")[1])


@pytest.fixture
def saved(tmp_path):
    config, params = load(FOLDER / "llama2")
    checkpoints.save(tmp_path / "ckpt", params, config)
    return checkpoints.resolve(str(tmp_path / "ckpt")), config, abstract_params(config, "float32", make_placement())


def test_a_missing_array_is_named(saved):
    source, config, abstract = saved
    with fails(ValueError, "layers.9.qkv", "missing"):
        checkpoints.load_params(source, config, abstract | {"layers.9.qkv": abstract["layers.0.qkv"]})


def test_an_extra_array_is_named(saved):
    source, config, abstract = saved
    with fails(ValueError, "layers.1.down", "not part"):
        checkpoints.load_params(source, config, {k: v for k, v in abstract.items() if k != "layers.1.down"})


def test_a_wrong_shape_is_named(saved):
    source, config, abstract = saved
    with fails(ValueError, "norm", "(48,)", "(49,)"):
        checkpoints.load_params(source, config, abstract | {"norm": jax.ShapeDtypeStruct((49,), jnp.float32)})


def test_a_folder_in_the_way_is_refused_before_any_work(saved, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    with fails(FileExistsError, str(tmp_path / "full"), "not empty"):
        convert("nobody/nothing", tmp_path / "full")
    with fails(FileExistsError, str(tmp_path / "full"), "not empty"):
        checkpoints.save(tmp_path / "full", {}, saved[1])
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    config, params = load(FOLDER / "llama2")

    class Tokenizer:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    with fails(OSError, "disk full"):
        checkpoints.save(tmp_path / "ckpt", params, config, Tokenizer())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["a model", "a head"])
def test_a_full_disk_is_a_line(to, tmp_path, caplog):
    """And no traceback of orbax's threads."""
    config, params = load(FOLDER / "llama2")
    path, tensors = tmp_path / "out" / "ckpt", {"x": np.random.default_rng(0).random(9000)}
    save = {
        "a model": lambda: checkpoints.save(path, params, config),
        "a head": lambda: head_folders.save(path, {}, tensors, "0" * 64),
    }
    with fails(DiskError, f"{path} cannot be written ({SAYS}): "), files_end_at(20_000):
        save[to]()
    assert not caplog.records
    assert not list((tmp_path / "out").iterdir())


def test_an_interrupt_leaves_nothing_of_what_is_being_written(tmp_path, monkeypatch):
    """Orbax's threads go on for a while, and make folders that are missing."""
    config, params = load(FOLDER / "llama2")

    def save(path, _):
        while True:
            path.mkdir(parents=True, exist_ok=True)
            (path / "part").write_text("half")
            if not interrupted:
                interrupted.append(True)
                os.kill(os.getpid(), signal.SIGINT)

    interrupted: list[bool] = []
    monkeypatch.setattr("orbax.checkpoint.experimental.v1.save", save)
    monkeypatch.setattr(orbax, "PATIENCE", 300)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tmp_path / "ckpt", params, config)
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_may_be_filled(tmp_path):
    config, params = load(FOLDER / "llama2")
    (tmp_path / "ckpt").mkdir()
    checkpoints.save(tmp_path / "ckpt", params, config)
    assert_same(load(tmp_path / "ckpt")[1], params)


def test_damaged_folders_are_named(saved):
    source, *_ = saved
    path = source.path / orbax.CONFIG_FILE
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"flux": 1}))
    with fails(ValueError, str(path), "flux"):
        checkpoints.load_config(source)
    path.write_text("{")
    with fails(ValueError, str(path)):
        checkpoints.load_config(source)
    (source.path / orbax.PARAMS).rename(source.path / "elsewhere")
    with fails(FileNotFoundError, "params"):
        checkpoints.load_params(source, *saved[1:])


def test_a_run_on_a_full_disk_keeps_what_it_has(tmp_path, caplog):
    state = {"w": jnp.asarray(np.random.default_rng(0).random(9000))}
    history = orbax.History(tmp_path / "run", "length")
    history.save(0, state, {"length": 1.0})
    history.close()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    history = orbax.History(tmp_path / "run", "length")
    with fails(DiskError, f"{tmp_path / 'run'} cannot be written ({SAYS}): "), files_end_at(20_000):
        try:
            history.save(1, state, {"length": 2.0})
        finally:
            history.close()
    assert not caplog.records
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert orbax.History(tmp_path / "run", "length").last == 0


@pytest.mark.parametrize("removed", ["metrics", "state", "."])
def test_a_run_killed_while_it_removed_a_checkpoint_goes_on(removed, tmp_path):
    """What is left of the old one is neither the last nor the best, and goes with the next."""

    def save(step, length):
        history = orbax.History(tmp_path / "run", "length")
        found = history.last, history.best
        history.save(step, {"w": jnp.full(3, length)}, {"length": length})
        history.close()
        return found

    steps = lambda: sorted(path.name for path in (tmp_path / "run").iterdir())
    assert save(0, 1.0) == (None, None)
    shutil.copytree(tmp_path / "run" / "0", tmp_path / "old")
    assert save(25, 2.0) == (0, 1.0)
    assert steps() == ["25"]
    shutil.rmtree(tmp_path / "old" / removed)
    (tmp_path / "old").mkdir(exist_ok=True)
    (tmp_path / "old").rename(tmp_path / "run" / "0")
    assert save(50, 1.5) == (25, 2.0)
    assert steps() == ["25", "50"]

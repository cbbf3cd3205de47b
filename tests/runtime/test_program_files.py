"""Lowered programs on disk: a later start runs them untraced; whatever is wrong with a file, the program is right."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import jax
import pytest

from jaxspec.engine import batch
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.runtime import program_files, programs
from jaxspec.runtime.plans import Plan
from tests.support import tiny_models
from tests.support.lively_models import OPTIONS, PROMPTS, noisy, plain, serve, target, texts
from tests.support.sizes import cases

WANTED = (
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(max_tokens=9, seed=4, logprobs=2, prompt_logprobs=1),
)
SPEC = {"model": "x", "num_speculative_tokens": 2}


def new(folder, tensor_parallel_size=1):
    t = target(tensor_parallel_size=tensor_parallel_size)
    sizes = OPTIONS | {"max_num_seqs": 2, "prefill_chunk": 64, "tensor_parallel_size": tensor_parallel_size}
    engine = tiny_models.engine(t, SPEC, noisy(t), **sizes)
    engine.runner.programs.folder = folder
    return engine


def said(engine) -> list:
    requests = serve(engine, PROMPTS[1:3], list(WANTED))
    assert [r.error for r in requests] == [None, None]
    return texts(requests)


def untraced(monkeypatch) -> None:
    def traced(*arguments):
        raise AssertionError("traced again")

    monkeypatch.setattr(programs, "FUNCTIONS", dict.fromkeys(programs.FUNCTIONS, traced))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the programs of one service in it."""
    folder = tmp_path_factory.mktemp("kept") / "programs"
    assert said(new(folder)) == plain(PROMPTS[1:3], WANTED)
    return folder


def test_a_later_start_traces_nothing(folder, monkeypatch):
    untraced(monkeypatch)
    engine = new(folder)
    assert said(engine) == plain(PROMPTS[1:3], WANTED)
    assert engine.runner.programs.num_compiled == len(list(folder.iterdir()))


def test_caches_are_updated_in_place(folder, monkeypatch):
    untraced(monkeypatch)
    engine = new(folder)
    before = [(leaf, leaf.unsafe_buffer_pointer()) for leaf in jax.tree.leaves(engine.runner.cache)]
    said(engine)
    assert all(leaf.is_deleted() for leaf, _ in before)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.runner.cache)] == [at for _, at in before]


@cases("damage", ["cut", "flipped", "no header", "empty", "a folder", "half a header"], quick=["flipped"])
def test_a_damaged_file_is_made_anew(folder, tmp_path, damage):
    for path in folder.iterdir():
        whole, copy = path.read_bytes(), tmp_path / path.name
        if damage == "a folder":
            copy.mkdir()
            continue
        middle = len(whole) // 2
        copy.write_bytes(
            {
                "cut": whole[:-100],
                "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
                "no header": whole.partition(b"\n")[2],
                "empty": b"",
                "half a header": whole[:20],
            }[damage]
        )
    assert said(new(tmp_path)) == plain(PROMPTS[1:3], WANTED)
    if damage != "a folder":
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()}.keys() == {p.name for p in folder.iterdir()}
        assert all(program_files.load(tmp_path, path.name) for path in folder.iterdir())


def test_a_file_that_another_user_can_have_written_is_made_anew(folder, tmp_path):
    for i, path in enumerate(folder.iterdir()):
        copy = tmp_path / path.name
        if i % 2:
            copy.symlink_to(path)
        else:
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o620)
        assert program_files.load(tmp_path, path.name) is None
    assert said(new(tmp_path)) == plain(PROMPTS[1:3], WANTED)
    assert {stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert all(program_files.load(tmp_path, path.name) for path in folder.iterdir())


def test_on_a_full_disk_it_runs(tmp_path, monkeypatch):
    def full(self, blob):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(program_files.Path, "write_bytes", full)
    assert said(new(tmp_path)) == plain(PROMPTS[1:3], WANTED)
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_it_runs(tmp_path):
    (tmp_path / "file").write_text("")
    assert said(new(tmp_path / "file")) == plain(PROMPTS[1:3], WANTED)


@pytest.mark.thorough
def test_two_devices(tmp_path, monkeypatch):
    assert said(new(tmp_path, 2)) == plain(PROMPTS[1:3], WANTED)
    untraced(monkeypatch)
    assert said(new(tmp_path, 2)) == plain(PROMPTS[1:3], WANTED)
    alone = new(tmp_path, 1)
    copying = Plan("copy_pages", batch.copied_pages([], alone.layout))
    with pytest.raises(AssertionError, match="traced again"):  # other programs
        alone.runner.compile(copying)


def test_what_jax_does_not_export_is_made_without(tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise ValueError("Cannot serialize code with custom calls")

    monkeypatch.setattr(program_files.export, "export", refused)
    assert said(new(tmp_path)) == plain(PROMPTS[1:3], WANTED)
    assert not list(tmp_path.iterdir())


def test_what_a_program_depends_on_is_in_its_name(monkeypatch):
    name = program_files.digest("a", "b")
    assert name == program_files.digest("a", "b") != program_files.digest("a", "c")
    assert program_files.digest("a", object()) is None, "an address says nothing"
    monkeypatch.setattr(program_files, "sources", lambda: "another version")
    assert program_files.digest("a", "b") != name
    monkeypatch.undo()
    monkeypatch.setattr(program_files.jaxlib, "__version__", "0")
    assert program_files.digest("a", "b") != name


@pytest.mark.thorough
def test_another_process_finds_them(folder):
    """Sets have another order there."""
    code = (
        "from tests.runtime.test_program_files import *; from pathlib import Path; import pytest; "
        f"p = pytest.MonkeyPatch(); untraced(p); print(said(new(Path({str(folder)!r}))))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", "import tests.conftest;" + code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip().endswith(str(plain(PROMPTS[1:3], WANTED)))

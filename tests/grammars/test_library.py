"""An automaton is built once, off the caller's thread, and kept on disk."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.grammars import build, library
from jaxspec.grammars.library import Library
from tests.grammars.walks import form, tokens

SOON = 300.0  # seconds in which what has to happen must happen, however busy the machine is


@pytest.fixture
def builds(monkeypatch):
    """Names of the threads in which automata were built."""
    names: list[str] = []
    own = build.automaton

    def counted(*args):
        names.append(threading.current_thread().name)
        return own(*args)

    monkeypatch.setattr(build, "automaton", counted)
    return names


def test_equal_grammars_are_built_once_in_the_librarys_thread(builds):
    known = Library(tokens, None)
    first = known.build(form(choice=["a", "b"]))
    again = known.build(form(choice=("b", "a", "b")))
    assert first is again
    assert first.result(SOON).digest
    assert known.build(form(regex="a")).result(SOON) is not first.result()
    assert [name.rpartition("_")[0] for name in builds] == ["jaxspec-grammars"] * 2


def test_a_later_start_reads_them_from_disk(builds, tmp_path):
    folder = tmp_path / "grammars"
    first = Library(tokens, folder).build(form(choice=["a"])).result(SOON)
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    found = Library(tokens, folder).build(form(choice=["a"])).result(SOON)
    assert len(builds) == 1
    assert found.digest == first.digest
    assert np.array_equal(found.next, first.next)
    assert np.array_equal(found.classes, first.classes)


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"\x93NUMPY" + b"\0" * 100, "half", "one byte"])
def test_a_damaged_file_is_built_again(builds, tmp_path, damage):
    Library(tokens, tmp_path).build(form(choice=["a"])).result(SOON)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    middle = len(data) // 2
    if damage == "half":
        damage = data[:middle]
    elif damage == "one byte":  # of a compressed array, which zlib notices
        at = data.index(b"classes.npy") + 40
        damage = data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
    path.write_bytes(damage)
    assert Library(tokens, tmp_path).build(form(choice=["a"])).result(SOON)
    assert len(builds) == 2
    assert path.read_bytes() == data


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert Library(tokens, file / "grammars").build(form(choice=["a"])).result(SOON)


def test_a_failure_is_that_requests_alone_and_is_tried_again(monkeypatch):
    known = Library(tokens, None)
    with pytest.raises(UserError, match="more than 16384 states"):
        known.build(form(regex=".*a.{20}")).result(SOON)
    assert known.build(form(choice=["a"])).result(SOON)
    own, fail = build.automaton, [MemoryError()]
    monkeypatch.setattr(build, "automaton", lambda *args: own(*args) if not fail else (_ for _ in ()).throw(fail.pop()))
    with pytest.raises(MemoryError):
        known.build(form(choice=["c"])).result(SOON)
    assert known.build(form(choice=["c"])).result(SOON)


def test_the_caller_does_not_wait(monkeypatch):
    began, go = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert go.wait(SOON)
        return tokens()

    known = Library(slow, None)
    future = known.build(form(choice=["a"]))
    assert began.wait(SOON)
    assert not future.done()
    go.set()
    assert future.result(SOON)


def test_only_the_newest_stay_on_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "MOST_FILES", 2)
    known = Library(tokens, tmp_path)
    for text in "abcd":
        known.build(form(choice=[text])).result(SOON)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("limit", ["MOST", "MOST_BYTES"])
def test_only_the_last_used_stay_in_memory(monkeypatch, builds, limit):
    size = Library(tokens, None).build(form(choice=["e"])).result(SOON).nbytes
    builds.clear()
    monkeypatch.setattr(library, limit, 2 if limit == "MOST" else 2 * size + size // 2)
    known = Library(tokens, None)
    a, b, c = (form(choice=[text]) for text in "abc")
    for grammar in (a, b, a, c, a):
        known.build(grammar).result(SOON)
    assert len(builds) == 3
    known.build(b).result(SOON)
    assert len(builds) == 4

"""The cache folder: what another user can have written is neither read nor written to, with one line."""

from __future__ import annotations

import os
import stat

import pytest

from jaxspec.common import trust
from jaxspec.common.trust import private_folder, trusted


def mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(trust, "reported", set())


@pytest.fixture
def given_away(monkeypatch):
    """Give a path to another user: really, where this process may, else by telling it that it is another user."""

    def give(path) -> None:
        if os.geteuid() == trust.ROOT:
            os.chown(path, 12345, -1)
        else:
            user = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: user)

    return give


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "jaxspec.common.trust"]


def read(path) -> bytes:
    with trusted(path) as file:
        return file.read()


def test_folders_are_made_for_this_user_alone(tmp_path, caplog):
    before = os.umask(0)
    try:
        assert private_folder(tmp_path / "cache" / "programs") == tmp_path / "cache" / "programs"
    finally:
        os.umask(before)
    assert mode(tmp_path / "cache") == mode(tmp_path / "cache" / "programs") == 0o700
    (tmp_path / "cache" / "programs").chmod(0o775)
    assert private_folder(tmp_path / "cache" / "programs")
    assert mode(tmp_path / "cache" / "programs") == 0o700
    assert lines(caplog) == []


def test_a_folder_of_another_user(tmp_path, caplog, given_away):
    folder = tmp_path / "programs"
    folder.mkdir()
    given_away(folder)
    assert [private_folder(folder), private_folder(folder)] == [None, None]
    (line,) = lines(caplog)
    assert f"{folder} belongs to user" in line
    assert "set JAXSPEC_CACHE to a folder of your own" in line
    assert mode(folder) != 0o700, "it is left as it is"


@pytest.mark.parametrize(("kind", "reason"), [("link", "is a link"), ("file", "cannot be used (Not a directory)")])
def test_what_stands_in_a_folders_place(tmp_path, caplog, kind, reason):
    (tmp_path / "there").mkdir(mode=0o755)
    if kind == "link":
        (tmp_path / "programs").symlink_to(tmp_path / "there")
    else:
        (tmp_path / "programs").touch()
    assert private_folder(tmp_path / "programs") is None
    assert f"{tmp_path / 'programs'} {reason}: nothing is read from it" in lines(caplog)[0]
    assert mode(tmp_path / "there") == 0o755


def test_a_place_where_nothing_can_be_made(caplog):
    assert private_folder(trust.Path("/proc/none/programs")) is None
    (line,) = lines(caplog)
    assert line.startswith("/proc/none/programs cannot be used (")


def test_own_files_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"own")
    assert read(tmp_path / "file") == b"own"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")


def test_files_of_another_user(tmp_path, caplog, given_away):
    for name in "ab":
        (tmp_path / name).write_bytes(b"planted")
        given_away(tmp_path / name)
    for name in "ab":
        with pytest.raises(PermissionError, match="belongs to user"):
            read(tmp_path / name)
    assert len(lines(caplog)) == 1, "one line for a folder"


def test_files_that_others_can_write(tmp_path, caplog):
    for bits in (0o620, 0o602):
        (tmp_path / "file").write_bytes(b"planted")
        (tmp_path / "file").chmod(bits)
        with pytest.raises(PermissionError, match="can be written by other users"):
            read(tmp_path / "file")
        with trusted(tmp_path / "file", closed=True) as file:
            assert file.read() == b"planted"
        assert mode(tmp_path / "file") == 0o600
    assert len(lines(caplog)) == 1


def test_links_and_pipes(tmp_path, caplog):
    (tmp_path / "target").write_bytes(b"own")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            read(tmp_path / name)
    assert "link is a link: nothing is read from it" in lines(caplog)[0]
    assert "pipe is neither a file nor a folder: nothing" in lines(caplog)[1]


def test_what_root_made_is_read(tmp_path, monkeypatch):
    """In a container's image, by another user."""
    (tmp_path / "file").write_bytes(b"made by root")
    owner = (tmp_path / "file").stat().st_uid
    monkeypatch.setattr(trust, "ROOT", owner)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert read(tmp_path / "file") == b"made by root"

"""Files are written whole or not at all, whatever ends the writing; a full disk is one line."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.common.errors import DiskError
from jaxspec.common.writing import disk_errors, system_error, whole
from tests.support.full_disk import SAYS, files_end_at


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with whole(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [KeyError(3), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space")], ids=repr)
def test_nothing_half_is_left(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("before")

    def write() -> None:
        with whole(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(DiskError if isinstance(error, OSError) else type(error)):
        write()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


WRITERS = {
    "python": lambda path: path.write_bytes(bytes(9000)),
    "numpy": lambda path: np.savez(path, x=np.zeros(9000)),
    "safetensors": lambda path: save_file({"x": np.zeros(9000)}, path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_a_line(tmp_path, writer):
    path = tmp_path / "file.npz"
    with pytest.raises(DiskError) as caught, files_end_at(5000), whole(path) as partial:
        WRITERS[writer](partial)
    assert str(caught.value) == f"{path} cannot be written ({SAYS}): raise the limit of ulimit -f"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written (No space left on device): free some"),
        (PermissionError(errno.EACCES, "No"), "cannot be written (Permission denied): choose another place"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "free some space"),
        (
            ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes to file 3: x [os_error_code='28']"),
            "free some space",
        ),
    ],
    ids=str,
)
def test_what_the_libraries_say(tmp_path, error, line):
    with pytest.raises(DiskError) as caught, disk_errors(tmp_path):
        raise error
    assert str(caught.value).startswith(str(tmp_path))
    assert line in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("another"), ConnectionError("no network"), DiskError("said already")])
def test_other_errors_pass(tmp_path, error):
    assert system_error(error) is None
    with pytest.raises(type(error), match=str(error)), disk_errors(tmp_path):
        raise error

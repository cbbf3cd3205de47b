"""Atomic writing of files, and a one-line error where the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxspec.common.errors import DiskError

ROOM = "free some space"
REMEDIES = {errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EFBIG: "raise the limit of ulimit -f"}


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to. It is renamed to `path` at the end and removed on failure."""
    partial = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name}")
    try:
        with disk_errors(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path, otherwise: str = "choose another place") -> Iterator[None]:
    """Turn a system error raised inside into a DiskError with one line that names this file or folder.

    otherwise: the remedy for errors other than a full disk, a quota or a file size limit.
    """
    try:
        yield
    except Exception as error:
        number = system_error(error)
        if number is None:
            raise
        remedy = REMEDIES.get(number, otherwise)
        raise DiskError(f"{path} cannot be written ({os.strerror(number)}): {remedy}") from error


def system_error(error: Exception) -> int | None:
    """Return the errno of a system error, else None. safetensors and orbax write the number only into the message."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os[_ ]error(?:_code)?[ =']*(\d+)", str(error))
    return int(found[1]) if found else None

"""Atomic writing of files, and one-line errors for a full disk and other failures to write."""

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
    """Yield a temporary path to write to, in the folder of `path`. The file written there is at last renamed to `path`.

    On failure the temporary file is removed.

    Raises: DiskError for a failure to write.
    """
    partial = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name}")
    try:
        with disk_errors(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path, otherwise: str = "choose another place") -> Iterator[None]:
    """Return a context that turns a system error into a DiskError with one line that names the file or folder `path`.

    otherwise: remedy for errors other than a full disk, a quota or a limit of file sizes.
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
    """Return the errno of a system error, or None for any other error.

    safetensors and orbax give the errno only in the error's message.
    """
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os[_ ]error(?:_code)?[ =']*(\d+)", str(error))
    return int(found[1]) if found else None

"""Files that are written whole or not at all, and one line where the disk does not take them."""

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
    """Yield a path beside this one to write to. The file gets its name at the end, and is removed after any failure."""
    partial = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name}")
    try:
        with disk_errors(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path, otherwise: str = "choose another place") -> Iterator[None]:
    """Raise DiskError, with one line that names this file or folder, where the system does not let it be written.
    otherwise: the remedy where no more space would help."""
    try:
        yield
    except Exception as error:
        if (number := system_error(error)) is None:
            raise
        remedy = REMEDIES.get(number, otherwise)
        raise DiskError(f"{path} cannot be written ({os.strerror(number)}): {remedy}") from error


def system_error(error: Exception) -> int | None:
    """Return the errno of an error: an OSError's, or what safetensors and orbax write into the texts of theirs."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os[_ ]error(?:_code)?[ =']*(\d+)", str(error))
    return int(found[1]) if found else None

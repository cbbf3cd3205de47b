"""Access to files of jaxspec's cache folder. A file is read only if no other user but root can write it.

Some of the files hold compiled programs. Loading a file that another user wrote would run that user's code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from jaxspec.common.writing import whole

logger = logging.getLogger(__name__)

ROOT = 0  # id of the user root, who is trusted: root can write every file, and often owns those of a container image
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
REMEDY = "delete it, or set JAXSPEC_CACHE to a folder of your own"
reported: set[tuple[Path, str]] = set()  # (folder, reason) of the warnings so far; each is logged only once


def cache_folder() -> Path:
    """Return the folder of cached files: $JAXSPEC_CACHE, else $XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec."""
    if chosen := os.environ.get("JAXSPEC_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxspec"


def distrust_reason(known: os.stat_result) -> str | None:
    """Return the reason why a file or folder with this status cannot be trusted, or None if it can be trusted."""
    if not stat.S_ISREG(known.st_mode) and not stat.S_ISDIR(known.st_mode):
        return "is neither a file nor a folder"
    if known.st_uid not in (ROOT, os.geteuid()):
        return f"belongs to user {known.st_uid}, this process to user {os.geteuid()}"
    if known.st_mode & WRITABLE_BY_OTHERS:
        return "can be written by other users"
    return None


def private_folder(path: Path) -> Path | None:
    """Make the folder if it is missing, remove other users' permissions and return it.

    If that fails or the folder cannot be trusted, log the reason and return None.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            close(found, 0o700)
            reason = distrust_reason(os.fstat(found))
        finally:
            os.close(found)
    except OSError as error:
        reason = "is a link" if os.path.islink(path) else f"cannot be used ({error.strerror})"
    if reason is None:
        return path
    report(path, path, reason)
    return None


def keep(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file for later starts, readable by this user only. A failure to write is ignored.

    write: function that writes the content to a temporary path, from which the file is then renamed to `path`.
    """
    if private_folder(path.parent):
        with contextlib.suppress(OSError), whole(path) as new:
            write(new)
            new.chmod(0o600)


@contextlib.contextmanager
def trusted(path: Path, *, closed: bool = False) -> Iterator[BufferedReader]:
    """Return a context with a file that no other user but root can write, opened for reading.

    closed: whether to remove other users' write permission first, instead of refusing a file that they can write. Only
      for callers that check the file's digest.

    Raises: OSError if the file is missing, cannot be read or cannot be trusted. Distrust is also logged.
    """
    try:
        with open(path, "rb", opener=opener) as file:
            if closed:
                close(file.fileno(), ~WRITABLE_BY_OTHERS)
            if reason := distrust_reason(os.fstat(file.fileno())):
                report(path.parent, path, reason)
                raise PermissionError(f"{path} {reason}")
            yield file
    except OSError:
        if os.path.islink(path):
            report(path.parent, path, "is a link")
        raise


def close(found: int, allowed: int) -> None:
    """Remove all permissions but `allowed` from a file or folder, if it belongs to this user and can be changed.

    found: descriptor of the open file or folder.
    allowed: mode bits of the permissions that may stay.
    """
    known = os.fstat(found)
    if known.st_uid == os.geteuid() and known.st_mode & ~allowed & 0o777:
        with contextlib.suppress(OSError):
            os.fchmod(found, stat.S_IMODE(known.st_mode) & allowed)


def opener(path: str, flags: int) -> int:
    """Open a file and return its descriptor, without following a link and without waiting."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # else opening a named pipe waits for its writer


def report(folder: Path, path: Path, reason: str) -> None:
    """Log the reason why a path is not used, once for each folder and reason."""
    if (folder, reason) not in reported:
        reported.add((folder, reason))
        logger.warning("%s %s: nothing is read from it or written there; %s", path, reason, REMEDY)

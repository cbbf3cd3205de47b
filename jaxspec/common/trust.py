"""Access to files of the cache folder. A file is read only if no other user can have written it.

Some files hold compiled programs: reading another user's file would run that user's code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

logger = logging.getLogger(__name__)

ROOT = 0  # trusted: root can write every file anyway, and often owns the files of a container image
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
REMEDY = "delete it, or set JAXSPEC_CACHE to a folder of your own"
reported: set[tuple[Path, str]] = set()  # (folder, reason): reported once for all files of the folder


def cache_folder() -> Path:
    """Return the folder of cached files: JAXSPEC_CACHE, else $XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec."""
    if chosen := os.environ.get("JAXSPEC_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxspec"


def distrust_reason(known: os.stat_result) -> str | None:
    """Return why a file or folder with this status cannot be trusted, or None where it can."""
    if not stat.S_ISREG(known.st_mode) and not stat.S_ISDIR(known.st_mode):
        return "is neither a file nor a folder"
    if known.st_uid not in (ROOT, os.geteuid()):
        return f"belongs to user {known.st_uid}, this process to user {os.geteuid()}"
    if known.st_mode & WRITABLE_BY_OTHERS:
        return "can be written by other users"
    return None


def private_folder(path: Path) -> Path | None:
    """Make the folder if it is missing, close it to other users and return it. On failure log why and return None."""
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


@contextlib.contextmanager
def trusted(path: Path, *, closed: bool = False) -> Iterator[BufferedReader]:
    """Open a file that no other user can have written.

    closed: whether to take write permission from other users first, instead of refusing a file that they can write.
    For callers that check the file's digest.

    Raises: OSError where the file is missing, cannot be read or cannot be trusted. The last is also logged.
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
    """Remove all permissions but `allowed` from this user's file or folder, unless its file system is read-only."""
    known = os.fstat(found)
    if known.st_uid == os.geteuid() and known.st_mode & ~allowed & 0o777:
        with contextlib.suppress(OSError):
            os.fchmod(found, stat.S_IMODE(known.st_mode) & allowed)


def opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # without O_NONBLOCK a pipe waits for its writer


def report(folder: Path, path: Path, reason: str) -> None:
    """Log why a path is not used, once for each folder and reason."""
    if (folder, reason) not in reported:
        reported.add((folder, reason))
        logger.warning("%s %s: nothing is read from it or kept there; %s", path, reason, REMEDY)

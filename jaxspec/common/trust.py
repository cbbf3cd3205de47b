"""Files of the cache folder: they are read back only where no other user can have written them. Some hold programs, so
that reading another user's file would run that user's code."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

logger = logging.getLogger(__name__)

ROOT = 0  # may write everything anyway, and made the files in a container's image
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
REMEDY = "delete it, or set JAXSPEC_CACHE to a folder of your own"
reported: set[tuple[Path, str]] = set()  # folder and reason: one line for all its files


def cache_folder() -> Path:
    """Where fetched files are kept: JAXSPEC_CACHE, else jaxspec in XDG_CACHE_HOME, else ~/.cache/jaxspec."""
    if chosen := os.environ.get("JAXSPEC_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxspec"


def flaw(known: os.stat_result) -> str | None:
    """Return why a file or folder of this status cannot be trusted, or None."""
    if not stat.S_ISREG(known.st_mode) and not stat.S_ISDIR(known.st_mode):
        return "is neither a file nor a folder"
    if known.st_uid not in (ROOT, os.geteuid()):
        return f"belongs to user {known.st_uid}, this process to user {os.geteuid()}"
    if known.st_mode & WRITABLE_BY_OTHERS:
        return "can be written by other users"
    return None


def private_folder(path: Path) -> Path | None:
    """Return the folder, made where it is missing and closed to other users; None, with a line, where that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            close(found, 0o700)
            reason = flaw(os.fstat(found))
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
    """Open a file that no other user can have written; closed: or can write from now on, where its digest is known.

    Raises: OSError where it is missing or cannot be read; also, with a line, where it cannot be trusted.
    """
    try:
        with open(path, "rb", opener=opener) as file:
            if closed:
                close(file.fileno(), ~WRITABLE_BY_OTHERS)
            if reason := flaw(os.fstat(file.fileno())):
                report(path.parent, path, reason)
                raise PermissionError(f"{path} {reason}")
            yield file
    except OSError:
        if os.path.islink(path):
            report(path.parent, path, "is a link")
        raise


def close(found: int, allowed: int) -> None:
    """Take all but these permissions from an own file or folder, where its file system can be written."""
    known = os.fstat(found)
    if known.st_uid == os.geteuid() and known.st_mode & ~allowed & 0o777:
        with contextlib.suppress(OSError):
            os.fchmod(found, stat.S_IMODE(known.st_mode) & allowed)


def opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its writer


def report(folder: Path, path: Path, reason: str) -> None:
    if (folder, reason) not in reported:
        reported.add((folder, reason))
        logger.warning("%s %s: nothing is read from it or kept there; %s", path, reason, REMEDY)

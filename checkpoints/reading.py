"""Reading of files that may be damaged. Every failure is reported in one line that names the file."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.common.errors import MisfitError, UnsupportedError, UserError

LONGEST = 400  # largest number of characters kept of a library's error message; some are paragraphs
MOST_JSON = 2**28  # largest size of a JSON file, in bytes
# Kinds of files that are never opened, by the file type in their mode.
SPECIAL = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Keys of a configuration whose null entries have meanings: no sliding window; as many key-value heads as query heads.
NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads")


def is_regular_file(path: Path) -> bool:
    """Return whether a regular file exists at this path. Call this function before a file is opened.

    Raises: UserError for a fifo, socket or device, because reading one might never end.
    """
    if not path.exists():
        return False
    mode = path.stat().st_mode
    if what := SPECIAL.get(stat.S_IFMT(mode)):
        raise UserError(f"{path} is {what}: give a regular file")
    return stat.S_ISREG(mode)


@contextlib.contextmanager
def naming_file(where: Path | str) -> Iterator[None]:
    """Turn errors in the block into a UserError, UnsupportedError or OSError of one line that names a file.

    Libraries raise errors of any class for damaged files, even MemoryError and RecursionError. The original error is
    attached as the cause. These errors pass unchanged: errors of devices, such as too little memory; errors of the
    operating system; a keyboard interrupt; and MisfitError, for a draft that was made for another target.

    where: the file, or another name for the source of the data.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MisfitError):  # errors where correcting the file would not help
        raise
    except NotImplementedError as error:
        raise UnsupportedError(line(where, error)) from error
    except OSError as error:
        if error.errno is not None:  # an error of the operating system, which names the file
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(line(where, error)) from error
    except BaseException as error:
        # Python turns an interrupt that comes while a class is made, as in an import, into a RuntimeError.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        # A panic of Rust code, as in the library tokenizers, is not a subclass of Exception in Python.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = line(where, error)
        if isinstance(error, MemoryError):
            text = f"{where}: reading it takes more memory than there is"
        elif "again" not in text:
            text += ": correct the file, or fetch it again"
        raise UserError(text) from error


def line(where: Path | str, error: BaseException) -> str:
    """Return an error's message as one line that names `where`. The message is shortened to LONGEST characters."""
    text = " ".join(str(error).split())
    if str(where) in text and len(text) <= LONGEST + len(str(where)):
        return text
    if not isinstance(error, ValueError | NotImplementedError | OSError):
        # The class is added, because "KeyError: 'model'" is clearer than the message "'model'" alone.
        text = f"{type(error).__name__}: {text}"
    return f"{where}: {text if len(text) <= LONGEST else text[:LONGEST] + '…'}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises: FileNotFoundError where the file is missing; UserError where it is larger than MOST_JSON or holds no JSON
      object. Both name the file.
    """
    if not is_regular_file(path):
        raise FileNotFoundError(f"{path} is missing")
    if (size := path.stat().st_size) > MOST_JSON:
        raise UserError(f"{path} has {size} bytes, more than {MOST_JSON} for a configuration: fetch it again")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): correct it, or fetch it again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a JSON {type(raw).__name__}, not an object: correct it, or fetch it again")
    return raw


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON configuration and remove its null entries, because null means the same as a missing key there.

    Entries of NULL_IS_A_VALUE stay. Raises as `read_json` does.
    """
    try:
        found: dict[str, Any] = without_nulls(read_json(path))
    except RecursionError:
        raise UserError(f"{path} is nested too deeply: correct it, or fetch it again") from None
    return found


def without_nulls(value: Any, kept: Collection[str] = NULL_IS_A_VALUE) -> Any:
    """Return a JSON value without the null entries of its objects. Objects within lists stay as they are.

    kept: keys whose null entries stay.
    """
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(x, kept) for key, x in value.items() if x is not None or key in kept}

"""Reading files that may be damaged: every failure is reported in one line that names the file."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.common.errors import MisfitError, UnsupportedError, UserError

LONGEST = 400  # characters kept of a library's error message; some are paragraphs
MOST_JSON = 2**28  # bytes that a JSON file may have
# Kinds of files that are never opened.
SPECIAL = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Keys of a configuration whose null has a meaning: no window; as many key-value heads as query heads.
NULL_IS_A_VALUE = ("sliding_window", "num_key_value_heads")


def is_regular_file(path: Path) -> bool:
    """Return whether a regular file of this name exists. Call it before a file is opened.

    Raises: UserError for a fifo, socket or device: reading one might never end.
    """
    if not path.exists():
        return False
    mode = path.stat().st_mode
    if what := SPECIAL.get(stat.S_IFMT(mode)):
        raise UserError(f"{path} is {what}: give a regular file")
    return stat.S_ISREG(mode)


@contextlib.contextmanager
def naming_file(where: Path | str) -> Iterator[None]:
    """Turn any error in the block into a UserError, UnsupportedError or OSError of one line that names `where`.

    Libraries raise errors of any class over damaged files, even MemoryError and RecursionError. The original error is
    attached as the cause. Two kinds pass unchanged: errors of devices, such as too little memory, and MisfitError, for
    files made for something else.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MisfitError):  # mending the file would not help
        raise
    except NotImplementedError as error:
        raise UnsupportedError(line(where, error)) from error
    except OSError as error:
        if error.errno is not None:  # raised by the operating system, with the file's name
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(line(where, error)) from error
    except BaseException as error:
        # A panic of Rust code, as in tokenizers, is not a subclass of Exception in Python.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = line(where, error)
        if isinstance(error, MemoryError):
            text = f"{where}: reading it takes more memory than there is"
        elif "again" not in text:
            text += ": mend the file, or fetch it again"
        raise UserError(text) from error


def line(where: Path | str, error: BaseException) -> str:
    """Return the error's message as one line that names `where`, shortened to LONGEST characters of its own."""
    text = " ".join(str(error).split())
    if str(where) in text and len(text) <= LONGEST + len(str(where)):
        return text
    if not isinstance(error, ValueError | NotImplementedError | OSError):
        # "KeyError: 'model'" says more than "'model'".
        text = f"{type(error).__name__}: {text}"
    return f"{where}: {text if len(text) <= LONGEST else text[:LONGEST] + '…'}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: FileNotFoundError; UserError if the file holds no JSON object. Both name the file."""
    if not is_regular_file(path):
        raise FileNotFoundError(f"{path} is missing")
    if (size := path.stat().st_size) > MOST_JSON:
        raise UserError(f"{path} has {size} bytes, no configuration has more than {MOST_JSON}: fetch it again")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): mend it, or fetch it again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a JSON {type(raw).__name__}, not an object: mend it, or fetch it again")
    return raw


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration without its keys that are null: there null means absent. Raises as `read_json` does."""
    try:
        found: dict[str, Any] = without_nulls(read_json(path))
    except RecursionError:
        raise UserError(f"{path} is nested too deeply: mend it, or fetch it again") from None
    return found


def without_nulls(value: Any, kept: Collection[str] = NULL_IS_A_VALUE) -> Any:
    """Return a JSON value without the keys of its objects whose value is null, except the keys `kept`."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(x, kept) for key, x in value.items() if x is not None or key in kept}

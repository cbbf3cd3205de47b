"""Errors that a user can correct, and the exception for SIGTERM.

An OSError, such as a missing file, can be corrected too. Any other error that leaves jaxspec is a fault of the program.
"""

from __future__ import annotations

import re
from typing import Any, Self

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
CLOSING = {"(": ")", "[": "]", "{": "}", "'": "'", '"': '"'}  # opening bracket or quote -> its closing one


class UserError(ValueError):
    """The error for an input or option that cannot be served.

    Its message is one line that names the value, the limit and the remedy. Any other ValueError that leaves jaxspec is
    a fault of the program.

    param: name of the option or field at fault, or None if it is not known.
    code: OpenAI's name for the kind of error, or None if OpenAI has no name for it.
    """

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def within(self, where: str) -> Self:
        """Return a new error like this one, with the text `where` in front of the message."""
        return type(self)(where + str(self), param=self.param, code=self.code)


class MisfitError(UserError):
    """The error for a valid input that does not fit the other inputs, for example a draft of another target."""


class UnsupportedError(UserError, NotImplementedError):
    """The error for a valid input that jaxspec does not support."""


class DiskError(OSError):
    """The error for a file that could not be written, for example on a full disk. No partial file is left behind."""


class Terminated(KeyboardInterrupt):
    """The exception raised for SIGTERM. It ends a command in the same way as an interrupt."""


def error_line(error: BaseException) -> str:
    """Return an error's type and message in one line of at most about 600 characters."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 600)


def shortened(text: str, most: int) -> str:
    """Return the text. If it is longer than `most` characters, cut it and add an ellipsis."""
    return text if len(text) <= most else text[:most] + "..."


def quoted(value: Any, most: int = 80) -> str:
    """Return the repr of a value for a message. If it is longer than `most` characters, cut it and add an ellipsis.

    Quotes and brackets that the cut left open are closed, so that the message's sentence can continue after the value.
    For a value whose repr fails, return its type's name, or for an int a text on its size.
    """
    try:
        text = repr(value)
    except Exception:  # raised for very large ints, for deep nesting, or by an object's own __repr__
        if isinstance(value, int):
            return f"{'-' * (value < 0)}(more than {most} digits)"
        return f"<{type(value).__name__}>"
    return text if len(text) <= most else shortened(text, most) + closing(text[:most])


def closing(text: str) -> str:
    """Return the quotes and brackets that close those still open at the end of `text`, the beginning of a repr."""
    still_open: list[str] = []
    for character in re.sub(r"\\.", "", text):  # without escaped characters: an escaped quote closes nothing
        if still_open and character == still_open[-1]:
            still_open.pop()
        elif character in CLOSING and not (still_open and still_open[-1] in "'\""):
            still_open.append(CLOSING[character])
    return "".join(reversed(still_open))

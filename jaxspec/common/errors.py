"""What a user can mend, told apart from what should not have happened."""

from __future__ import annotations

import re
from typing import Any, Self

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
CLOSING = {"(": ")", "[": "]", "{": "}", "'": "'", '"': '"'}


class UserError(ValueError):
    """What was given cannot be served; one line names the value, the limit and the remedy. Any other ValueError that
    leaves jaxspec is a fault of the program.

    param: the option or field at fault; code: OpenAI's name for the kind of error. None where neither is known.
    """

    def __init__(self, message: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    def within(self, where: str) -> Self:
        """The same error, with its place in front of its message."""
        return type(self)(where + str(self), param=self.param, code=self.code)


class MisfitError(UserError):
    """What was given is right in itself, and made for something else."""


class UnsupportedError(UserError, NotImplementedError):
    """It could be served by a program that did more than this one does."""


class DiskError(OSError):
    """A file that could not be written, for example on a full disk; nothing half is left of it."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as an interrupt does."""


def said(error: BaseException) -> str:
    """What a message says of it: one line."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 600)


def shortened(text: str, most: int) -> str:
    """The text, with an ellipsis where it is longer than `most` characters."""
    return text if len(text) <= most else text[:most] + "..."


def quoted(value: Any, most: int = 80) -> str:
    """The repr of a value for a message. A long one ends in an ellipsis and closes its quotes and brackets, so that the
    sentence goes on after it."""
    try:
        text = repr(value)
    except Exception:  # Python refuses to write the largest numbers and what is nested deeply, and objects may fail
        if isinstance(value, int):
            return f"{'-' * (value < 0)}(more than {most} digits)"
        return f"<{type(value).__name__}>"
    return text if len(text) <= most else shortened(text, most) + closing(text[:most])


def closing(text: str) -> str:
    """Close the quotes and brackets that are open at the end of this beginning of a repr."""
    still_open: list[str] = []
    for character in re.sub(r"\\.", "", text):  # no escaped quotes
        if still_open and character == still_open[-1]:
            still_open.pop()
        elif character in CLOSING and not (still_open and still_open[-1] in "'\""):
            still_open.append(CLOSING[character])
    return "".join(reversed(still_open))

"""What a user can mend, told apart from what should not have happened."""

from __future__ import annotations

from typing import Self

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


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


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as an interrupt does."""


def said(error: BaseException) -> str:
    """What a message says of it: one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

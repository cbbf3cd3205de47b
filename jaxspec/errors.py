"""What a user can mend, told apart from what should not have happened."""

from __future__ import annotations


class UserError(ValueError):
    """What was given cannot be served; one line names the value, the limit and the remedy. Any other ValueError that
    leaves jaxspec is a fault of the program."""


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
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

"""How a command ends: its exit status, and one line on standard error where it is not 0. JAXSPEC_DEBUG=1 shows every
error's traceback.

  0         it did what it was asked for
  1         a fault of the program, shown with its traceback; or nobody reads its output any more
  2         what it was given is wrong, or more than the machine has room for: the line says what to change
  130, 143  it was interrupted (SIGINT, SIGTERM): the line says what is kept
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import typer

from jaxspec.common.errors import DiskError, Terminated, UserError
from jaxspec.common.progress import say
from jaxspec.parallel import hosts
from jaxspec.parallel.absent import other_platforms
from jaxspec.parallel.peers import end_at_once

PATIENCE = 1.0  # seconds
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
LONGEST = 600  # characters of a line; compilers have a lot to say
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's, which typer does not name
NO_ROOM = "RESOURCE_EXHAUSTED"  # what XLA says where memory is short
OUR_FAULT = "not your input's fault: please report it with the traceback above"
LESS = "ask for less at a time: a smaller model, fewer rows, a shorter context or fewer drafts"


def status(run: Callable[[], Any]) -> int:
    """Runs a command, and tells how it ended."""
    try:
        with interruptible():
            run()
            sys.stdout.flush()  # here a closed pipe can still be told from a failure
        return 0
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:
        # Nothing more can be told. What is left in the buffer has to go somewhere when Python flushes it.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        tell("interrupted" + (f": {stop}" if str(stop) else ""))
        return STOPPED[signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT]
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `jaxspec` alone
            error.show()
        else:
            tell(usage(error))
        return 2
    except Exception as error:
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        code, line = failure(error)
        if code == 1:
            traceback.print_exception(error)
        tell(line)
        return code


def leave(code: int, *, at_once: bool) -> NoReturn:
    """Ends the process. Where it did not end well, at once: threads of the compiler that are still at work crash in a
    Python that is being taken down, and those of orbax wait ten minutes for what will not come. At once, too, where
    programs are being compiled that nobody wants any more."""
    if at_once and code:
        hosts.leave(code)
        end_at_once(code)
    if at_once and any(thread.name.startswith("jaxspec-compiling") for thread in threading.enumerate()):
        end_at_once(code)
    sys.exit(code)


@contextlib.contextmanager
def keeping(what: Callable[[], str]) -> Iterator[None]:
    """Have an interrupt, or a disk that is full, say what is kept, once all that was open is closed."""
    try:
        yield
    except DiskError as error:
        raise DiskError(f"{error}; {what()}") from error
    except KeyboardInterrupt as stop:
        raise type(stop)(what()) from None


def tell(line: str) -> None:
    line = " ".join(line.split())
    say("jaxspec: " + (line if len(line) <= LONGEST else line[:LONGEST] + " ..."), always=True)


def usage(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "jaxspec"
    return f"{error.format_message().rstrip('.')} ({command} --help lists the options)"


def failure(error: Exception) -> tuple[int, str]:
    """The status and the line of what a command could not do."""
    text = str(error)
    if isinstance(error, MemoryError) or NO_ROOM in text:
        first, *_ = text.strip().splitlines() or [""]
        return 2, f"out of memory{f' ({first})' if first else ''}: {LESS}"
    if isinstance(error, (UserError, OSError)) and text:  # OSError: missing files, no connection
        return 2, text
    if line := other_platforms(error):
        return 2, line
    return 1, f"{type(error).__name__}{f': {text}' if text else ''} ({OUR_FAULT})"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, once. Another one ends the process at once, whatever it is doing; but
    not directly after the first, which `timeout` and others send to the process and to its group."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
    first: list[float] = []  # when it came

    def stop(number: int, frame: Any) -> None:
        if not first:
            first.append(time.monotonic())
            raise kinds[signal.Signals(number)]
        if time.monotonic() - first[0] > PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def lost(unraisable: Any) -> None:
        """Where it comes in a callback of the garbage collector, as JAX has one, Python drops it: it comes again."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            return hook(unraisable)
        first.clear()
        number = signal.SIGTERM if isinstance(unraisable.exc_value, Terminated) else signal.SIGINT
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()

    hook, sys.unraisablehook = sys.unraisablehook, lost
    before = {kind: signal.signal(kind, stop) for kind in kinds}
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if not first:  # else the process is about to end, and may be sent more of them
            for kind, handler in before.items():
                signal.signal(kind, handler)

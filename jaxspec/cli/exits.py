"""The end of a command: its exit status and, if it failed, one line on standard error.

The environment variable JAXSPEC_DEBUG=1 shows the traceback of every error except a wrong use of options.

  0         success
  1         a fault of the program, shown with its traceback; or, without a line, nobody reads the output any more
  2         wrong input, a file or connection that fails, or too little memory: the line says what to change
  130, 143  interruption by SIGINT or SIGTERM: the line says what is saved, if the command saves anything
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
from jaxspec.common.progress import write_line
from jaxspec.parallel import hosts
from jaxspec.parallel.absent import other_platforms
from jaxspec.parallel.peers import end_at_once

PATIENCE = 1.0  # seconds after a first interrupt in which further interrupts are ignored
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
LONGEST = 600  # number of characters after which an error line is cut, because messages of compilers are long
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's UsageError, which typer does not export
NO_ROOM = "RESOURCE_EXHAUSTED"  # text in XLA's errors when memory is short
OUR_FAULT = "a fault of jaxspec, not of your input: please report it with the traceback above"
LESS = "ask for less at a time: a smaller model, fewer rows, a shorter context or fewer drafts"


def status(run: Callable[[], Any]) -> int:
    """Run a command and return its exit status. If it fails, write one line about the error to standard error.

    Nothing is written if the command failed because nobody reads its output any more.
    """
    try:
        with interruptible():
            run()
            sys.stdout.flush()  # flush here, so that a closed pipe raises BrokenPipeError before Python exits
        return 0
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:
        # At its exit Python flushes the rest of the buffer. That would fail again, so send the rest to the null device.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        print_error("interrupted" + (f": {stop}" if str(stop) else ""))
        return STOPPED[signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT]
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # raised by the word `jaxspec` without a command
            error.show()
        else:
            print_error(usage(error))
        return 2
    except Exception as error:
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        code, line = failure(error)
        if code == 1:
            traceback.print_exception(error)
        print_error(line)
        return code


def leave(code: int, *, at_once: bool) -> NoReturn:
    """End the process with this exit status.

    at_once: whether to skip Python's own exit after an error, or while programs are still compiled in the background.
      The compiler's threads crash while Python shuts down. After an error, orbax's threads wait ten minutes for a
      result that never comes.
    """
    if at_once and code:
        hosts.leave(code)
        end_at_once(code)
    if at_once and any(thread.name.startswith("jaxspec-compiling") for thread in threading.enumerate()):
        end_at_once(code)
    sys.exit(code)


@contextlib.contextmanager
def keeping(describe: Callable[[], str]) -> Iterator[None]:
    """Add a text on what is saved to the message of an interrupt or a DiskError raised inside this context.

    describe: function that returns the text. It is called when the code inside the context has ended and closed its
      files.
    """
    try:
        yield
    except DiskError as error:
        raise DiskError(f"{error}; {describe()}") from error
    except KeyboardInterrupt as stop:
        raise type(stop)(describe()) from None


def print_error(line: str) -> None:
    """Write an error line to standard error, even in a process whose progress is not shown."""
    line = " ".join(line.split())
    write_line("jaxspec: " + (line if len(line) <= LONGEST else line[:LONGEST] + " ..."), always=True)


def usage(error: Any) -> str:
    """Return the error line for a wrong use of a command's options. error: click's UsageError."""
    command = error.ctx.command_path if error.ctx else "jaxspec"
    return f"{error.format_message().rstrip('.')} ({command} --help lists the options)"


def failure(error: Exception) -> tuple[int, str]:
    """Return the exit status and the error line for an exception."""
    text = str(error)
    if isinstance(error, MemoryError) or NO_ROOM in text:
        first, *_ = text.strip().splitlines() or [""]
        detail = f" ({first})" if first else ""
        return 2, f"out of memory{detail}: {LESS}"
    if isinstance(error, (UserError, OSError)) and text:  # an OSError is for example a missing file, or no connection
        return 2, text
    line = other_platforms(error)
    if line:
        return 2, line
    detail = f": {text}" if text else ""
    return 1, f"{type(error).__name__}{detail} ({OUR_FAULT})"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have the first SIGINT or SIGTERM raise KeyboardInterrupt inside this context, and a later one end the process.

    A signal within PATIENCE seconds of the first is ignored, because `timeout` and other programs send theirs both to
    the process and to its process group. Outside the main thread, which alone gets signals, this context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
    first: list[float] = []  # time of the first signal, once that has come
    dropped = threading.Event()  # set from when Python drops a signal's exception until the signal has come again

    def stop(number: int, frame: Any) -> None:
        if dropped.is_set() and runs(send_again, frame):
            return  # Python would drop the exception here too; the signal is sent again
        dropped.clear()
        if not first:
            first.append(time.monotonic())
            raise kinds[signal.Signals(number)]
        if time.monotonic() - first[0] > PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def send_again(unraisable: Any) -> None:
        """Send the signal again if Python dropped its exception, as in JAX's callback of the garbage collector."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)
            return
        first.clear()
        dropped.set()
        number = signal.SIGTERM if isinstance(unraisable.exc_value, Terminated) else signal.SIGINT
        threading.Thread(target=send, args=(number,), daemon=True).start()

    def send(number: int) -> None:
        while dropped.is_set():
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    hook = sys.unraisablehook
    sys.unraisablehook = send_again
    before = {kind: signal.signal(kind, stop) for kind in kinds}
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if not first:  # after a signal the handlers stay: the process is about to end, and further signals may come
            for kind, handler in before.items():
                signal.signal(kind, handler)


def runs(function: Callable[..., Any], frame: Any) -> bool:
    """Return whether a stack frame belongs to this function, or to a function that it has called."""
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False

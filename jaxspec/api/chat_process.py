"""Rendering of chat templates in a process of its own, within limits that the operating system enforces.

A template is a program from the checkpoint. It may never end, or compute 10**(10**10) in a single instruction. Another
thread cannot stop such a program, but its process can be killed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

from jaxspec.api.chat import Rendering
from jaxspec.common.errors import UserError, error_line

SECONDS = 2.0
MEMORY = 1 << 30  # largest number of bytes that the child process may use beyond those that its imports took
ADDED = 1_000_000  # largest number of characters by which a template's output may exceed its input's number of bytes
PREFIX = 8  # size, in bytes, of the integer before each message to the child process: the message's length


class TemplateProcess:
    """A child process that renders one conversation at a time. If it ends, another one replaces it.

    seconds: limit of processor time for one conversation. Time spent waiting for the processor does not count.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-chat")
        self.lock = threading.RLock()  # protects `child` and `closed`
        self.child: subprocess.Popen[bytes] | None = None
        self.closed = False

    async def text(self, rendering: Rendering) -> str:
        """Return the text that the template writes. Raise UserError as Rendering.text does, or if a limit is exceeded.

        Raises: RuntimeError if the child process ends for another reason.
        """
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.render, rendering)

    def start(self) -> subprocess.Popen[bytes]:
        """Return the child process. If there is none, start one, which is ready about a second later."""
        with self.lock:
            if self.closed:
                raise RuntimeError("the process of chat templates was shut down")
            if self.child is None or self.child.poll() is not None:
                release(self.child)
                paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
                self.child = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(self.seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"PYTHONPATH": paths, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
                    start_new_session=True,  # so that an interrupt at the terminal reaches only the parent process
                )
            return self.child

    def render(self, rendering: Rendering) -> str:
        """Send a conversation to the child process and return the rendered text. Raise errors as `text` does."""
        try:
            sent = pickle.dumps(rendering)
        except Exception as error:  # pickling calls methods of the caller's objects, which may raise any error
            raise UserError(f"the conversation cannot be sent to another process: {error_line(error)}") from error
        child = self.start()
        assert child.stdin is not None
        assert child.stdout is not None
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(len(sent).to_bytes(PREFIX) + sent)
            child.stdin.flush()
            reply = child.stdout.readline()
        if not reply:
            raise self.ended(child)
        found = json.loads(reply)
        if "refused" in found:
            raise UserError(found["refused"])
        text: str = found["text"]
        return text

    def ended(self, child: subprocess.Popen[bytes]) -> Exception:
        """Return the error for a child process that ended without a reply.

        Start another child process, unless this object was closed.
        """
        status = child.wait()
        if not self.closed:
            self.start()
        if status == -signal.SIGPROF:
            return UserError(
                f"the model's chat template took more than {self.seconds:g} seconds of processor time for these "
                "messages: shorten them, or change chat_template_kwargs"
            )
        return RuntimeError(f"the process of chat templates ended with status {status}")

    def close(self) -> None:
        """End the child process, even while it renders a conversation."""
        with self.lock:
            self.closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.child is not None:
            self.child.kill()
            release(self.child)


def release(child: subprocess.Popen[bytes] | None) -> None:
    """Wait for a child process that has ended or was killed, and close its pipes."""
    if child is not None:
        # Closing a pipe raises BrokenPipeError if the child did not read all of its input.
        with contextlib.suppress(BrokenPipeError), child:
            pass


# The functions below run in the child process.


def main(seconds: float) -> None:
    """Read conversations from standard input, and write a line of JSON for each, until the parent closes the input.

    seconds: limit of processor time for one conversation.
    """
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # sends what libraries print on standard output to standard error
        import transformers.tokenization_utils_base  # noqa: F401  # imported before the limits apply

        limit_memory()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # so that the timer's signal ends the process
        while prefix := sys.stdin.buffer.read(PREFIX):
            sent = sys.stdin.buffer.read(int.from_bytes(prefix))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = answer(sent)
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(reply + "\n")
            replies.flush()


def answer(sent: bytes) -> str:
    """Return the reply to one conversation as JSON: the rendered text, or the reason why it is refused.

    sent: the pickled Rendering.
    """
    try:
        text = pickle.loads(sent).text()
        most = len(sent) + ADDED
        if len(text) > most:
            raise UserError(
                f"the model's chat template made {len(text)} characters of these messages, at most {most} may be: "
                "shorten them, or change chat_template_kwargs"
            )
        return json.dumps({"text": text})
    except Exception as error:
        return json.dumps({"refused": str(error) if isinstance(error, UserError) else error_line(error)})


def limit_memory() -> None:
    """Limit the address space of this process to MEMORY bytes more than it has now, if the system can."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():  # systems without /proc, such as macOS, cannot limit the address space
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(float(sys.argv[1]))

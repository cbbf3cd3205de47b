"""Chat templates in a process of its own, within limits that the kernel enforces.

A template is a program of the checkpoint. No thread can stop one that never ends, or one that computes 10**(10**10) in
a single instruction; its process can be ended.
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
from jaxspec.common.errors import UserError, said

SECONDS = 2.0
MEMORY = 1 << 30  # bytes beside those that the process holds when it has started
ADDED = 1_000_000  # characters of output beside as many as the input has bytes
PREFIX = 8  # bytes that hold the length of a message to the child


class TemplateProcess:
    """Renders one conversation at a time in a child process, which is replaced where it ends.

    seconds: of processor time that one may take; a busy machine does not count.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-chat")
        self.lock = threading.RLock()  # guards the two below
        self.child: subprocess.Popen[bytes] | None = None
        self.closed = False

    async def text(self, rendering: Rendering) -> str:
        """The text that the template makes. Raises UserError as Rendering.text does, and beyond a limit."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.render, rendering)

    def start(self) -> subprocess.Popen[bytes]:
        """The child, which is started where there is none and ready a second later."""
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
                    start_new_session=True,  # an interrupt at the terminal is the parent's
                )
            return self.child

    def render(self, rendering: Rendering) -> str:
        try:
            sent = pickle.dumps(rendering)
        except Exception as error:  # whatever an object of the caller's raises
            raise UserError(f"the conversation cannot be sent to another process: {said(error)}") from error
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
        return found["text"]

    def ended(self, child: subprocess.Popen[bytes]) -> Exception:
        """Explain why the child gave no reply, and start another one for the next conversation."""
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
        """Ends the child, and with it what is being rendered."""
        with self.lock:
            self.closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.child is not None:
            self.child.kill()
            release(self.child)


def release(child: subprocess.Popen[bytes] | None) -> None:
    """Wait for a child that has ended or was killed, and close its pipes."""
    if child is not None:
        with contextlib.suppress(BrokenPipeError), child:  # what it did not read is dropped
            pass


# The child


def main(seconds: float) -> None:
    """Reads renderings from standard input, and writes a line of JSON for each, until the parent closes it."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what a library prints is no reply
        import transformers.tokenization_utils_base  # noqa: F401  # before anything is limited

        limit_memory()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
        while prefix := sys.stdin.buffer.read(PREFIX):
            sent = sys.stdin.buffer.read(int.from_bytes(prefix))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = answer(sent)
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(reply + "\n")
            replies.flush()


def answer(sent: bytes) -> str:
    try:
        text = pickle.loads(sent).text()
        if len(text) > (most := len(sent) + ADDED):
            raise UserError(
                f"the model's chat template made {len(text)} characters of these messages, at most {most} may be: "
                "shorten them, or change chat_template_kwargs"
            )
        return json.dumps({"text": text})
    except Exception as error:
        return json.dumps({"refused": str(error) if isinstance(error, UserError) else said(error)})


def limit_memory() -> None:
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere, such as on macOS, address space cannot be limited
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(float(sys.argv[1]))

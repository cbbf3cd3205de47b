"""Headless Chromium, driven by its debugging protocol over a pipe: what a page shows, and keys and clicks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOON = 300.0  # seconds that only end a test that hangs
FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--mute-audio"),
)
# Chromium reads commands from descriptor 3 and writes events to 4. This program moves the pipes there and becomes it.
START = """
import fcntl, os, sys
read, write, *command = sys.argv[1:]
copies = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in (read, write)]
for place, copy in zip((3, 4), copies):
    os.dup2(copy, place)
os.execv(command[0], command)
"""


class Page:
    """A page of a browser. errors: what its console, its scripts and the policy of its server complained about."""

    def __init__(self, sending: int, receiving: int) -> None:
        self.sending, self.receiving = sending, receiving
        self.buffer, self.count, self.session = b"", 0, None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        os.write(
            self.sending, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        while (answer := self.read()).get("id") != self.count:
            self.hear(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self) -> dict[str, Any]:
        until = time.monotonic() + SOON
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.receiving], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser says nothing"
            self.buffer += os.read(self.receiving, 1 << 20)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SOON
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)

    def press(self, key: str, text: str = "") -> None:
        """Press a key, such as "Enter" or "ArrowRight"."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
        described = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **described)
        self.call("Input.dispatchKeyEvent", type="keyUp", **described)

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element of a selector, with the mouse."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{box}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({box}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, scale: float = 1.0, scheme: str = "light") -> None:
        """Set the window's size, and the colour scheme "light" or "dark"."""
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile in this folder, and give a page of it."""
    assert FOUND is not None
    (read, sending), (receiving, write) = os.pipe(), os.pipe()

    command = [FOUND, *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(read), str(write), *command],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (read, write):
        os.close(end)
    try:
        yield Page(sending, receiving)
    finally:
        process.kill()
        process.wait()
        for end in (sending, receiving):
            os.close(end)

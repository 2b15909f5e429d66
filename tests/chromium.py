"""Headless Chromium, driven by the DevTools protocol over a pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser's program; None where there is none."""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_EXEC_WITH_PIPES = "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 63); os.dup2(w, 62)\n"
_EXEC_WITH_PIPES += "os.dup2(63, 3); os.dup2(62, 4); os.execv(sys.argv[3], sys.argv[3:])"
_KEYS = {"Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
_KEYS |= {"ArrowDown": 40, "Tab": 9}


class Page:
    """One tab. `requests` are the addresses that it has loaded, `errors` what went wrong in its scripts."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer, self._id, self._session = read, write, b"", 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._id:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium has ended.")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        parameters = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        return message

    def open(self, address: str, ready: str = "document.readyState === 'complete'") -> None:
        """Load an address, and wait until the expression `ready` is true."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait_for(f"location.href !== 'about:blank' && {ready}")

    def wait_for(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{expression} did not become true; errors: {self.errors}")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, as a keyboard would."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = _KEYS.get(key, ord(key.upper()) if key.isalnum() and len(key) == 1 else 0)
        down: dict[str, Any] = {"type": "keyDown" if text else "rawKeyDown", "key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", **down, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """`kind` is mousePressed, mouseMoved or mouseReleased."""
        held = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {"buttons": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """`kind` is touchStart, touchMove or touchEnd."""
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x, y in points])

    def screen(self, width: int, height: int, *, dark: bool = False, still: bool = False, scale: float = 1.0) -> None:
        """The size of the window, and what its reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write what is shown, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with an empty profile and one tab."""
    assert PATH is not None
    browser_reads, write = os.pipe()
    read, browser_writes = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        starter = [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PIPES, str(browser_reads), str(browser_writes)]
        process = subprocess.Popen(
            [*starter, PATH, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(browser_reads, browser_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield Page(read, write)
        finally:
            process.terminate()
            process.wait(20)
            os.close(read)
            os.close(write)

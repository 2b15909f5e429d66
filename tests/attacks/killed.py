"""A program that kills itself (SIGKILL) at one of its file-system calls in a directory, or some time after the first.

    python killed.py '{"directory": DIR, "call": 17}' train catch a2c --out DIR
    python killed.py '{"directory": DIR, "seconds": 1.5}' resume DIR
    python killed.py '{"directory": DIR, "report": FILE}' PROGRAM.py ARGUMENTS...

The last form kills nothing, and writes how many calls and seconds there were. Calls are those that Python audits:
opened, renamed, truncated and deleted files, made and listed folders; a process is killed just before it makes one.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

CALLS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Watch:
    """Counts the calls in a directory and kills the process at the one that was chosen."""

    def __init__(self, directory: str, call: int | None = None, seconds: float | None = None) -> None:
        self.directory, self.call, self.seconds = os.path.abspath(directory), call, seconds
        self.calls, self.began = 0, 0.0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in CALLS or not arguments or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if not os.path.abspath(os.fsdecode(arguments[0])).startswith(self.directory):
            return
        if self.calls == 0:
            self.began = time.monotonic()
            if self.seconds is not None:
                timer = threading.Timer(self.seconds, kill)
                timer.daemon = True
                timer.start()
        self.calls += 1
        if self.calls == self.call:
            kill()


def main() -> int:
    wish, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    report = wish.pop("report", None)
    watch = Watch(**wish)
    sys.addaudithook(watch)
    sys.argv = ["jaxpg", *arguments]
    code = 0
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        from jaxpg.cli.main import main as jaxpg

        code = jaxpg(arguments)
    if report:
        Path(report).write_text(json.dumps({"calls": watch.calls, "seconds": time.monotonic() - watch.began}))
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Commands up to the point where they would train: what they say, what they write, how long they take."""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxpg.cli import commands
from jaxpg.cli.main import main
from jaxpg.runs import trained, training

SECONDS = 10.0
"""Of computing, more than any command may take to refuse something."""


class Accepted(BaseException):
    """Raised in place of training and of loading a run: what was given has passed every check before."""


class Outcome(NamedTuple):
    """How a command ended.

    code: its exit code; None where it was accepted.
    error: what it wrote to stderr.
    left: names of the files that it left in its directory.
    """

    code: int | None
    error: str
    left: list[str]


@contextlib.contextmanager
def no_training() -> Iterator[None]:
    """Raise Accepted instead of training; a whole command is then a few milliseconds."""

    def accept(*_: object, **__: object) -> None:
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((training, "train"), (commands, "train_sweep"), (trained, "restore")):
            patch.setattr(module, name, accept)
        yield


def attempt(arguments: Sequence[str], folder: Path, files: Mapping[str, bytes] | None = None) -> Outcome:
    """Run a command in an empty folder that has these files, and check what holds for every command.

    Exit code 0 or 2, nothing but one line on stderr, no other exception than Accepted, no file left after a refusal.
    """
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
    before, home = set(os.listdir(folder)), Path.cwd()
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), no_training(), warnings.catch_warnings():
            code = _exit_code(arguments)
    finally:
        os.chdir(home)
    outcome = Outcome(code, err.getvalue(), sorted(set(os.listdir(folder)) - before))
    assert time.process_time() - began < SECONDS
    assert code in (None, 0, 2), outcome
    if code == 2:
        assert outcome.error.startswith("jaxpg: "), outcome
        assert outcome.error.endswith("\n"), outcome
        assert len(outcome.error.splitlines()) == 1, outcome
        assert "Traceback" not in outcome.error, outcome
        assert outcome.left == [], outcome
    return outcome


def _exit_code(arguments: Sequence[str]) -> int | None:
    try:
        return main(arguments)
    except Accepted:
        return None
    except SystemExit as ended:  # --help
        return int(ended.code or 0)

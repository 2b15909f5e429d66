"""Every "Resume with: ..." is typed as it is printed: the end is that of an uninterrupted run, bit for bit."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from test_kills import KINDS, LIMIT, differences, ends, results, started, takes_minutes, whole

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
INTERRUPTIONS = [
    ("control", signal.SIGTERM, "metrics.jsonl"),
    ("text", signal.SIGINT, "sft/metrics.jsonl"),  # before the final run has a config
    ("text", signal.SIGTERM, "metrics.jsonl"),
    ("compare", signal.SIGINT, "reinforce/metrics.jsonl"),
    ("compare", signal.SIGTERM, "a2c/config.toml"),  # while it compiles
    ("sweep", signal.SIGINT, "program-000/wave-000/metrics.jsonl"),
    ("sweep", signal.SIGTERM, "program-001/wave-000/config.toml"),
    ("processes", signal.SIGINT, "metrics.jsonl"),
    ("processes", signal.SIGTERM, "metrics.jsonl"),
]


def wait_for(path: Path, processes: list[subprocess.Popen]) -> None:
    """Until a file is there and not empty."""
    deadline = time.monotonic() + LIMIT
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), "ended before it was interrupted"
        time.sleep(0.005)


def hint(errors: str) -> list[str]:
    """The arguments of the command that is printed last."""
    return shlex.split(re.findall(r"(?:Go on|this one) with: jaxpg (.*)$", errors, re.MULTILINE)[-1])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The results of the kinds that have been run so far."""
    return {}


@pytest.mark.full
@takes_minutes
@pytest.mark.parametrize(
    ("kind", "number", "moment"), INTERRUPTIONS, ids=[f"{k}-{n.name}" for k, n, _ in INTERRUPTIONS]
)
def test_a_hint_goes_on_with_the_same_result(
    kind: str, number: signal.Signals, moment: str, tmp_path: Path, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    chosen, out = KINDS[kind], tmp_path / "it's mine"
    if kind not in uninterrupted:
        (tmp_path / "whole").mkdir()
        whole(chosen, tmp_path / "whole" / "run")
        uninterrupted[kind] = results(tmp_path / "whole" / "run")
    wishes: list[dict[str, Any]] = [{} for _ in range(chosen.processes)]
    with started(chosen, chosen.begin, out, wishes) as processes:
        wait_for(out / moment, processes)
        sent = time.monotonic()
        processes[-1].send_signal(number)
        errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
        if number == signal.SIGTERM:
            assert time.monotonic() - sent < 30
    *others, signalled = [process.returncode for process in processes]
    assert signalled == CODES[number], errors
    # SIGTERM before the first chunk has ended leaves nothing to save: that process goes, and the others see it gone.
    assert set(others) <= ({CODES[number], 2} if number == signal.SIGTERM else {CODES[number]}), errors
    assert not any("Traceback" in text for text in errors)
    arguments = hint(errors[0])
    if chosen.processes > 1:  # the next start has another port, and gives each process its number
        assert arguments[-2:] == ["--process", "0"]
        arguments = arguments[: arguments.index("--distributed")]
    ended = ends(chosen, [*arguments, "--quiet"], out, wishes)
    assert [code for code, _ in ended] == [0] * chosen.processes, ended
    assert differences(uninterrupted[kind], results(out)) == []

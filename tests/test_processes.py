"""Several processes that communicate over loopback are one run; if one of them ends, all end, with a sentence.

One CPU device each, and few processes, for two cores.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny import LONG

from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.parallel import process_exit
from jaxpg.parallel.processes import on_main_process
from jaxpg.training import run_directory
from jaxpg.training.lock import locked

TASK = ["train", "catch", "a2c", "--seeds", "2", "--steps", "9000"]
SHORT = ["--set", "num_envs=4", "--set", "evaluation_episodes=8", "--set", "evaluations=3"]
LIMIT = 240  # seconds that a run may take on a machine that does other things
GONE = "jaxpg: another process of this run has exited; the last checkpoint is {}. Restart all processes to resume"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def process(arguments: list[str], **environment: str) -> subprocess.Popen:
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxpg", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | own | environment,
        text=True,
    )


@contextlib.contextmanager
def processes(
    number: int, out: Path, *more: str, slurm: bool = False, each: Sequence[list[str]] = ()
) -> Iterator[list[subprocess.Popen]]:
    """Processes of one run, with the options of `--distributed` or with Slurm's variables; killed at the end."""
    port, started = str(free_port()), []
    command = [*TASK, *SHORT, "--out", str(out), "--devices", str(number), "--distributed", *more]
    try:
        for i in range(number):
            if slurm:
                names = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID", "STEP_NUM_NODES")
                values = ("1", "127.0.0.1", str(number), str(i), str(i), "1")
                variables = {f"SLURM_{name}": value for name, value in zip(names, values, strict=True)}
                started.append(process(command, JAX_COORDINATOR_PORT=port, **variables))
            else:
                options = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(number), "--process", str(i)]
                started.append(process([*command, *options, *(each[i] if each else [])]))
        yield started
    finally:
        for one in started:
            one.kill()
            one.wait()
            one.stdout.close()
            one.stderr.close()


def ends(run: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    streams = [one.communicate(timeout=LIMIT) for one in run]
    return [(one.returncode, *texts) for one, texts in zip(run, streams, strict=True)]


def wait_for(condition: Callable[[], object], run: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        assert all(one.poll() is None for one in run), [one.stderr.read() for one in run if one.poll() is not None]
        time.sleep(0.01)


def last_checkpoint(out: Path) -> Path | None:
    return max((path.parent for path in out.glob("checkpoints/*/manifest.json")), default=None)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("one") / "run"
    assert main([*TASK, *SHORT, "--devices", "1", "--quiet", "--out", str(out)]) == 0
    return run_directory.load_metrics(out)


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """The directory of a run of two processes, and how they ended."""
    out = tmp_path_factory.mktemp("two") / "run"
    with processes(2, out, slurm=True) as run:
        return out, ends(run)


def learned_the_same(metrics: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(metrics["steps"], expected["steps"])
    np.testing.assert_allclose(metrics["value_loss"][:3], expected["value_loss"][:3], rtol=1e-3)


@pytest.mark.full
def test_two_processes_are_one_run(
    by_two: tuple[Path, list[tuple[int, str, str]]], on_one_device: dict[str, np.ndarray]
) -> None:
    """As Slurm starts them, a seed each. One log, one checkpoint, and one process that prints."""
    out, (first, second) = by_two
    assert (first[0], second) == (0, (0, "", "")), first
    assert "in 2 processes" in first[1]
    assert first[1].count("9,024 / 9,000 steps") == 1
    assert "IQM" in first[1]
    learned_the_same(run_directory.load_metrics(out), on_one_device)
    names = {path.name for path in out.iterdir()}
    assert names == {
        "plan.json",
        "config.toml",
        "run.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "learning_curve.png",
        "report.html",
    }
    assert len(list((out / "tensorboard").iterdir())) == 1


@LONG
@pytest.mark.full
def test_four_processes_share_the_environments_of_two_seeds(
    tmp_path: Path, on_one_device: dict[str, np.ndarray]
) -> None:
    """Gradients are summed over processes."""
    with processes(4, tmp_path / "run", "--quiet") as run:
        assert [(code, err) for code, _, err in ends(run)] == [(0, "")] * 4
    learned_the_same(run_directory.load_metrics(tmp_path / "run"), on_one_device)


@pytest.mark.full
def test_a_killed_process_ends_all_and_they_resume(
    tmp_path: Path, by_two: tuple[Path, list[tuple[int, str, str]]]
) -> None:
    """The second, then the first. The other ends with a sentence; resumed, the metrics are those of a whole run."""
    out, resume = tmp_path / "run", []
    for victim in (1, 0):
        before = last_checkpoint(out)
        with processes(2, out, "--quiet", *resume) as run:
            wait_for(lambda before=before: last_checkpoint(out) != before, run)
            run[victim].kill()
            killed = time.monotonic()
            ((code, _, errors),) = ends([run[1 - victim]])
            assert time.monotonic() - killed < 20  # 10 at most where nothing else keeps the cores
        assert (code, errors.count("\n")) == (2, 1), errors
        assert errors.startswith(GONE.format(last_checkpoint(out)))
        resume = ["--resume"]
    with processes(2, out, "--quiet", *resume) as run:
        assert ends(run)[1] == (0, "", "")
    metrics, expected = run_directory.load_metrics(out), run_directory.load_metrics(by_two[0])
    for name in expected.keys() - {"seconds", "chunk_seconds"}:
        np.testing.assert_array_equal(metrics[name], expected[name], err_msg=name)


@pytest.mark.full
def test_an_interrupt_of_one_stops_and_saves_all(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with processes(2, tmp_path, "--quiet") as run:
        wait_for(lambda: metrics.exists() and metrics.stat().st_size, run)
        run[1].send_signal(signal.SIGINT)
        first, second = ends(run)
    assert (first[0], second[0]) == (130, 130), (first, second)
    assert "interrupted and saved. Resume with" in first[2]
    assert "finishing this chunk" in second[2]
    assert "interrupted" not in second[2]
    assert run_directory.load_metrics(tmp_path)["steps"][-1].min() == int(last_checkpoint(tmp_path).name) < 9000


def leave(code: int) -> None:
    """In place of `os._exit`."""
    raise SystemExit(code)


def test_a_file_that_the_first_cannot_use_ends_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells the others, which wait for it, and says why in a sentence, as a single process does."""
    told: list[list[bool]] = []

    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/plan.json")

    def tell(flags: list[bool]) -> list[bool]:
        told.append(flags)
        return flags

    def command() -> int:
        on_main_process(write)
        return 0

    monkeypatch.setattr("jaxpg.parallel.processes.any_process", tell)
    monkeypatch.setattr("jax.distributed.shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    assert process_exit.exit_together(command) == 2
    assert capsys.readouterr().err == "jaxpg: run/plan.json cannot be read or written (No space left on device).\n"
    assert told == [[True]]


def test_a_lost_process_is_told_where_the_checkpoints_are_gone_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def message() -> str:
        raise UserError("The folder of the checkpoints cannot be read.")

    monkeypatch.setattr(process_exit, "_lost_exit", threading.Lock())
    monkeypatch.setattr(process_exit, "_lost_message", message)
    monkeypatch.setattr(os, "_exit", leave)

    def command() -> int:
        raise RuntimeError("Gloo all-reduce failed")

    with pytest.raises(SystemExit, match="2"):
        process_exit.exit_together(command)
    assert capsys.readouterr().err == "jaxpg: another process of this run has exited.\n"


@pytest.mark.full
def test_an_error_of_the_first_ends_all(by_two: tuple[Path, list[tuple[int, str, str]]]) -> None:
    """The first process alone holds the lock of a directory, so it alone finds another process there."""
    with locked(by_two[0]), processes(2, by_two[0], "--resume") as run:
        first, second = ends(run)
    assert (first[0], second[0]) == (2, 2)
    assert "is in use" in first[2]
    assert second[2] == "jaxpg: The first process of this run failed; its own message says why.\n"


@pytest.mark.full
def test_processes_with_different_arguments_are_refused(tmp_path: Path) -> None:
    with processes(2, tmp_path / "run", each=[["--set", "gamma=0.9"], []]) as run:
        assert [(code, "got different arguments" in errors) for code, _, errors in ends(run)] == [(2, True)] * 2
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_process_that_never_joins(tmp_path: Path) -> None:
    """The first waits, and another one waits; each says so."""
    command = [*TASK, "--out", str(tmp_path), "--distributed", "--join-seconds", "2", "--processes", "2"]
    alone = []
    try:
        for i in range(2):
            alone.append(process([*command, "--coordinator", f"127.0.0.1:{free_port()}", "--process", str(i)]))
        expected = "jaxpg: not all 2 processes of this run joined within 2 seconds (--join-seconds).\n"
        assert ends(alone) == [(2, "", expected)] * 2
    finally:
        for one in alone:
            one.kill()
            one.wait()
    assert not list(tmp_path.iterdir())


def test_no_cluster_is_found(tmp_path: Path) -> None:
    one = process([*TASK, "--distributed", "--out", str(tmp_path)])
    code, out, errors = ends([one])[0]
    assert (code, out, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("jaxpg: --distributed found no cluster here")


TWO_PROCESSES = ["--coordinator", "127.0.0.1:1234", "--processes", "2"]
REFUSED = [
    (["--distributed", *TWO_PROCESSES], "go together"),
    (["--distributed", "--process", "0"], "go together"),
    (["--distributed", *TWO_PROCESSES, "--process", "2"], "stays below --processes 2"),
    (["--distributed", *TWO_PROCESSES, "--process", "0", "--coordinator", "here"], "--coordinator takes HOST:PORT"),
    (["--distributed", *TWO_PROCESSES, "--process", "0", "--join-seconds", "0"], "--join-seconds must be at least 1"),
    (["--distributed", *TWO_PROCESSES, "--process", "0"], "--distributed needs --out"),
    (["--process", "0"], "--process is for one of several processes, --distributed"),
    (["--join-seconds", "9"], "--join-seconds is for one of several processes, --distributed"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_wrong_options_are_refused_before_processes_join(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TASK, *arguments]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert (errors[:7], errors.count("\n")) == ("jaxpg: ", 1)

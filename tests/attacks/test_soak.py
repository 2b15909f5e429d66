"""A long run does not grow: rows, evaluations, checkpoints and completions are not kept in memory.

The test trains the toy. A command of each kind runs for as long as one likes with a row, a checkpoint and an evaluation
every second or so, where a run of any length has 200 rows:

    PYTHONPATH=.:tests python tests/attacks/test_soak.py control --minutes 30
    PYTHONPATH=.:tests python tests/attacks/test_soak.py text --minutes 30
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import toy_learner

from jaxpg.cli.main import main as jaxpg
from jaxpg.runs import training
from jaxpg.training import checkpoint
from jaxpg.training.loop import TrainingHooks, train
from jaxpg.training.metrics_writer import Row
from jaxpg.types import Learner

STATUS = Path("/proc/self/status")
WARM_UP, ROWS = 10, 30
SIZE = 100_000  # numbers in the state of one seed of the toy
MIB = 2**20

COMMON = ["--seeds", "2", "--devices", "1", "--steps", "2000000000", "--quiet", "--out", "{out}"]
TINY = ["network.width=8", "network.layers=1", "network.heads=2", "num_envs=16"]
TINY += ["environment_settings.length=3", "environment_settings.min_length=3"]


class Kind(NamedTuple):
    """A command, {out} for its directory, and the steps between rows and between evaluations. Every row is saved."""

    command: list[str]
    log_every: int
    evaluate_every: int


KINDS = {
    "control": Kind(["train", "cartpole", "ppo", *COMMON, "--set", "num_envs=4"], 2_048, 8_192),
    "text": Kind(
        ["train", "sort", "grpo", *COMMON, "--set", "initial=none", *[word for x in TINY for word in ("--set", x)]],
        1_000,
        20_000,
    ),
}


def resident() -> float:
    """MiB of this process in memory, without mapped files, which the system drops and reads again as it likes."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


class Sample(NamedTuple):
    """What a process holds: MiB in memory, arrays on devices."""

    resident: float
    arrays: int


def watched(hooks: TrainingHooks, sample: Callable[[], None]) -> TrainingHooks:
    """The hooks, and `sample` is called at every row."""

    def on_row(row: Row) -> None:
        hooks.on_row(row)
        sample()

    return hooks._replace(on_row=on_row)


@pytest.mark.full
@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_rows_and_checkpoints_leave_nothing_in_memory(tmp_path: Path) -> None:
    """Growth after the first rows is far below what it would be if each of them kept its state."""
    samples: list[Sample] = []
    hooks = watched(TrainingHooks(), lambda: samples.append(Sample(resident(), len(jax.live_arrays()))))
    state = toy_learner.run(
        tmp_path / "run",
        learner=toy_learner.toy(size=SIZE),
        total_steps=4 * ROWS,
        evaluate=toy_learner.peak_at_ten,
        evaluate_every=8,
        hooks=hooks,
    )
    state_size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(state)) / MIB
    begin, end = samples[WARM_UP], samples[-1]
    assert end.arrays == begin.arrays
    assert end.resident - begin.resident < 0.5 * state_size * (ROWS - WARM_UP)


def soak(kind: Kind, minutes: float) -> None:
    """Run a command for so long, print each minute what it holds, and end it as Ctrl-C does."""
    began, shown, rows, saved, stopped = time.monotonic(), 0, 0, 0, False

    def sample() -> None:
        nonlocal shown, rows, stopped
        rows += 1
        passed = (time.monotonic() - began) / 60
        if passed >= shown + 1 or passed >= minutes:
            shown = int(passed)
            print(f"{passed:5.1f} min: {rows:6} rows, {saved:6} checkpoints, {resident():7.1f} MiB", flush=True)
        if passed >= minutes and not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGINT)

    def train_often(learner: Learner, *, hooks: TrainingHooks, **settings: Any) -> Any:
        often = {"log_every": kind.log_every, "evaluate_every": kind.evaluate_every, "checkpoint_seconds": 0.0}
        return train(learner, **(settings | often), hooks=watched(hooks, sample))

    def save(*arguments: Any, **settings: Any) -> checkpoint.Checkpoint:
        nonlocal saved
        saved += 1
        return original(*arguments, **settings)

    original = checkpoint.save
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train", train_often)
        patch.setattr(checkpoint, "save", save)
        jaxpg([word.format(out=Path(folder) / "run") for word in kind.command])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=30.0)
    arguments = parser.parse_args()
    soak(KINDS[arguments.kind], arguments.minutes)


if __name__ == "__main__":
    sys.exit(main())

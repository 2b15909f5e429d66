"""Progress on the terminal during training, and the signals that stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxpg.training.metrics_writer import Row

LINES = 10
"""Outside of a terminal a line is printed each time another of so many equal parts of a run is done."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 15.0
"""How long a chunk may take after SIGTERM; a machine that is taken away usually leaves 30 seconds."""


class Reporter:
    """Shows rows of metrics, in a terminal each row as a progress bar, otherwise some as lines; a context manager.

    The steps are those of each seed, as in `total_steps`; the steps per second are those of all seeds in all.

    Args:
        console: where to show it.
        total_steps: environment steps per seed.
    """

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console, self._total = console, total_steps
        self._first: Row | None = None  # of training
        self._parts_shown = -1
        self._training_seconds = 0.0  # since the first row, without evaluations and checkpoints
        self._latest: dict[str, float] = {}
        self._bar = Progress(
            TextColumn("{task.fields[steps]}"), BarColumn(20), TextColumn("{task.fields[rest]}"), console=console
        )
        self._task = self._bar.add_task("", total=total_steps, steps="", rest="compiling")

    def __enter__(self) -> Reporter:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, row: Row) -> None:
        steps = min(int(np.max(row["steps"])), self._total)  # of all seeds but those that diverged
        each = " each" if len(row["steps"]) > 1 else ""
        progress = f"{steps:,} / {self._total:,} steps{each}"
        rest = ", ".join([*self._pace(row), *self._returns(row)])
        if self._console.is_terminal:
            self._bar.update(self._task, completed=steps, steps=progress, rest=rest)
        elif (parts := LINES * steps // self._total) > self._parts_shown or row is self._first:
            self._parts_shown = parts
            print(f"{progress}, {rest}", file=self._console.file, flush=True)

    def _pace(self, row: Row) -> list[str]:
        """Steps per second of all seeds and the time left, from all rows but the first, which includes compiling."""
        if not np.any(row["iterations"]):  # the evaluation before training
            return ["compiling"]
        if self._first is None:
            self._first = row
            return [f"compiled in {row['chunk_seconds']:.1f} s"]
        self._training_seconds += row["chunk_seconds"]
        done = float(np.mean(row["steps"]) - np.mean(self._first["steps"]))
        seconds_per_step = (row["seconds"] - self._first["seconds"]) / max(done, 1.0)
        left = round(max(0.0, self._total - float(np.max(row["steps"]))) * seconds_per_step)
        in_all = " in all" if len(row["steps"]) > 1 else ""
        return [
            f"{done * len(row['steps']) / self._training_seconds:,.0f} steps/s{in_all}",
            f"{left // 60}:{left % 60:02d} left",
        ]

    def _returns(self, row: Row) -> list[str]:
        """The latest mean over seeds of the returns in training and in evaluation."""
        for name, word in (("return", "return"), ("evaluation_return", "evaluation")):
            if name in row and np.isfinite(row[name]).any():
                self._latest[word] = float(np.nanmean(row[name]))
        return [f"{word} {value:.4g}" for word, value in self._latest.items()]


class Interruption:
    """The signals that ask this process to stop, Ctrl-C (SIGINT) and SIGTERM, and what they do.

    The first one lets the current chunk end and be saved (`requested`). A second one ends the process at once. A
    SIGTERM comes from a machine that will be gone in seconds: it ends the process at once where there is nothing to
    save, and after GRACE_SECONDS in any case.

    Args:
        console: where progress is shown.
        resume_command: what goes on from there.
    """

    def __init__(self, console: Console, resume_command: str) -> None:
        self._console, self._resume_command = console, resume_command
        self._deadline = threading.Timer(GRACE_SECONDS, self._end, ["terminated before this chunk ended"])
        self._deadline.daemon = True
        self.signal: int | None = None
        self.has_trained = False  # whether a chunk has ended since a checkpoint was restored

    def requested(self) -> bool:
        """Whether a signal has asked this process to stop."""
        return self.signal is not None

    def watch(self, receiver: int) -> None:
        """Read the numbers of signals from a pipe until it is closed."""
        while number := os.read(receiver, 1):
            if number[0] in STOPPING:
                self.on_signal(number[0])

    def close(self) -> None:
        """Training has ended: nothing is to be stopped any more."""
        self._deadline.cancel()

    def on_signal(self, number: int) -> None:
        """Do what a signal asks for."""
        if self.signal is not None:
            self.signal = number
            self._end("stopped at once")
        self.signal = number
        if number == signal.SIGTERM:
            if not self.has_trained:
                self._end("terminated before a chunk ended")
            self._deadline.start()
        again = "press Ctrl-C again to stop at once" if number == signal.SIGINT else "a second SIGTERM stops at once"
        _say(f"finishing this chunk, then saving; {again}")

    def _end(self, why: str) -> None:
        """End this process without waiting for the computation."""
        assert self.signal is not None
        if self._console.is_terminal:
            self._console.show_cursor()
        _say(f"{why}; checkpoints are unchanged. Go on with: {self._resume_command}")
        os._exit(128 + self.signal)


@contextlib.contextmanager
def interruptible(console: Console, resume_command: str) -> Iterator[Interruption]:
    """Ctrl-C and SIGTERM stop what is trained inside, see `Interruption`.

    A thread waits for the signals, because the main thread does not run Python while XLA computes. Outside the main
    thread signals are left alone.
    """
    interruption = Interruption(console, resume_command)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
    old_sender = signal.set_wakeup_fd(sender)
    watcher = threading.Thread(target=interruption.watch, args=[receiver], daemon=True)
    watcher.start()
    try:
        yield interruption
    finally:
        interruption.close()
        signal.set_wakeup_fd(old_sender)
        for number, handler in old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        os.close(sender)
        watcher.join()
        os.close(receiver)


def _say(text: str) -> None:
    print(f"\njaxpg: {text}", file=sys.stderr, flush=True)

"""Progress on the terminal during training."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from jaxpg.report.comparison import format_duration
from jaxpg.training.metrics_writer import Row
from jaxpg.training.run_directory import stack_rows
from jaxpg.training.stalls import READ, stalls

LINES = 10
"""Lines that are printed during a run, evenly spaced, where there is no progress bar."""


class Reporter:
    """Shows rows of metrics, in a terminal each row as a progress bar, otherwise some as lines; a context manager.

    A dumb terminal (TERM=dumb), which cannot go back, gets lines.

    The steps are those of each seed, as in `total_steps`; the steps per second are those of all seeds in all.

    Args:
        console: where to show it.
        total_steps: environment steps per seed.
        to_follow: runs as long as this one that come after it, as the waves of a sweep do; their time is shown too.
    """

    def __init__(self, console: Console, total_steps: int, to_follow: float = 0.0) -> None:
        self._console, self._total, self._to_follow = console, total_steps, to_follow
        self._first: Row | None = None  # of training
        self._parts_shown = -1
        self._training_seconds = 0.0  # since the first row, without evaluations and checkpoints
        self._latest: dict[str, tuple[float, int]] = {}  # values with their steps
        self._bar = Progress(
            TextColumn("{task.fields[steps]}"), BarColumn(20), TextColumn("{task.fields[rest]}"), console=console
        )
        self._task = self._bar.add_task("", total=total_steps, steps="", rest="compiling")

    def __enter__(self) -> Reporter:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    @property
    def _has_bar(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def __call__(self, row: Row) -> None:
        steps = int(np.max(row["steps"]))  # of all seeds but those that diverged; the last iteration is finished
        shown = min(steps, self._total)  # by the bar, which has no room for more
        each = " each" if len(row["steps"]) > 1 else ""
        progress = f"{steps:,} / {self._total:,} steps{each}"
        rest = ", ".join([*self._pace(row), *self._returns(row)])
        if self._has_bar:
            self._bar.update(self._task, completed=shown, steps=progress, rest=rest)
        elif (parts := LINES * shown // self._total) > self._parts_shown or row is self._first:
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
        left = max(0.0, self._total - float(np.max(row["steps"]))) * seconds_per_step
        in_all = " in all" if len(row["steps"]) > 1 else ""
        pace = f"{done * len(row['steps']) / self._training_seconds:,.0f} steps/s{in_all}"
        if not self._to_follow:
            return [pace, f"{format_duration(left)} left"]
        whole = left + self._to_follow * self._total * seconds_per_step
        return [pace, f"{format_duration(left)} left of this wave, about {format_duration(whole)} of all"]

    def _returns(self, row: Row) -> list[str]:
        """The latest mean over seeds of the returns in training and in evaluation; of an old evaluation its step."""
        steps = int(np.max(row["steps"]))
        for name, word in (("return", "return"), ("evaluation_return", "evaluation")):
            if name in row and np.isfinite(row[name]).any():
                self._latest[word] = float(np.nanmean(row[name])), steps
        return [
            f"{word} {value:.4g}" + (f" at step {at:,}" if word == "evaluation" and at < steps else "")
            for word, (value, at) in self._latest.items()
        ]


class StallWarnings:
    """Says on a console why nothing is learned, each cause once, as soon as the rows show it (`stalls`).

    Args:
        console: where to say it.
        total_steps: environment steps per seed.
        threshold: the return that counts as solved.
        earlier: the rows of a run that is resumed.
    """

    def __init__(
        self, console: Console, total_steps: int, threshold: float | None, earlier: Sequence[Row] = ()
    ) -> None:
        self._console, self._total, self._threshold = console, total_steps, threshold
        self._rows = [_read(row) for row in earlier]
        self._said: set[str] = set(self._found()) if earlier else set()

    def __call__(self, row: Row) -> None:
        self._rows.append(_read(row))
        for cause, sentence in self._found().items():
            if cause not in self._said:
                self._said.add(cause)
                self._console.print(Text(f"Warning: {sentence}", "yellow"))

    def _found(self) -> dict[str, str]:
        return stalls(stack_rows(self._rows), total_steps=self._total, threshold=self._threshold)


def _read(row: Row) -> Row:
    return {name: row[name] for name in READ if name in row}

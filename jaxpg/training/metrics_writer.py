"""Writing the metrics of a run, a row per chunk: metrics.jsonl, and events for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxpg.errors import UserError
from jaxpg.files import explain_os_error, without_following

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
GROUPS = {
    "evaluation": ("evaluation_",),
    "episodes": ("return", "length", "episodes", "length_", "return_variation", "env_"),
    "completions": (
        *("accuracy", "format", "truncated", "correct", "incorrect", "frac_zero_std", "scratchpad_used"),
        *("reward_", "weighted_", "pass@", "cons@", "reasoning_steps"),
    ),
    "advantages": ("advantage_",),
    "gradients": ("gradient_norm", "policy_gradient_norm", "value_gradient_norm"),
    "policy": ("entropy", "approx_kl", "reference_kl", "clipped_", "policy_loss"),
    "critic": ("value_loss", "explained_variance", "q_value", "td_loss"),
    "time": ("iteration", "iterations", "updates"),
}
"""The groups of metrics in a dashboard: names, and how names begin (with a _ or @ at the end)."""
Row = dict[str, Any]
"""Metrics of a chunk: name -> [S], and two wall times: `seconds` since the run began, `chunk_seconds` of this chunk.
The row before the first chunk has the evaluation at step 0; its `iterations` and `chunk_seconds` are 0."""


def tag_of(name: str) -> str:
    """A metric as dashboards show it, in its group: "evaluation/return", "policy/entropy"; others are in "training"."""
    for group, members in GROUPS.items():
        if any(name == member or (member[-1] in "_@" and name.startswith(member)) for member in members):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"training/{name}"


def open_events(folder: Path, steps: int) -> EventsWriter:
    """A file of events for TensorBoard, which withdraws earlier ones after `steps`, where a run is resumed."""
    folder.mkdir(exist_ok=True, parents=True)
    events = EventsWriter(str(folder / "events"), f".{steps}")  # SummaryWriter hangs on a full disk
    if steps:
        events.write_event(Event(step=steps + 1, session_log=SessionLog(status=SessionLog.START)))
    return events


class WrittenRows(NamedTuple):
    """What a checkpoint notes of metrics.jsonl: how many bytes it had, and their CRC-32.

    checksum: None in a checkpoint of an earlier version, which had only the length.
    """

    size: int = 0
    checksum: int | None = 0


class MetricsWriter:
    """Appends rows to metrics.jsonl and to TensorBoard's events; a context manager.

    A run that is resumed writes again what was written after its last checkpoint.

    Args:
        run_dir: the directory of the run; `run_directory.check_records` has found its metrics.jsonl to be whole.
        keep: bytes of metrics.jsonl at that checkpoint, 0 for a new run; the rest is cut off.
        steps: environment steps at that checkpoint; TensorBoard discards later events.
    """

    def __init__(self, run_dir: Path, *, keep: int, steps: int) -> None:
        self._run_dir, self._path = run_dir, run_dir / METRICS
        with explain_os_error(run_dir), contextlib.ExitStack() as opened:
            self._file = opened.enter_context(open(self._path, "a+b", opener=without_following))
            self._file.seek(0)
            self._checksum = zlib.crc32(self._file.read(keep))
            self._file.truncate(keep)
            self._events = open_events(run_dir / TENSORBOARD, steps)
            opened.pop_all()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for stream in (self._file, self._events):
            with contextlib.suppress(OSError):  # rows are flushed one by one; what is left could not be written
                stream.close()

    def write(self, row: Row) -> None:
        """Append a row, flushed to the operating system; to TensorBoard go the means over finite seeds.

        Raises:
            UserError: the disk is full, or the file has been deleted, moved or replaced since it was opened.
        """
        line = json.dumps({name: _jsonable(value) for name, value in row.items()}).encode() + b"\n"
        means = {
            name: np.asarray(x, float)[np.isfinite(x)] for name, x in row.items() if name != "steps" and np.ndim(x)
        }
        values = [Summary.Value(tag=tag_of(name), simple_value=float(x.mean())) for name, x in means.items() if x.size]
        steps = int(np.min(row["steps"]))
        with explain_os_error(self._run_dir):
            self._check_place()
            self._file.write(line)
            self._file.flush()
            self._checksum = zlib.crc32(line, self._checksum)
            self._events.write_event(Event(step=steps, wall_time=time.time(), summary=Summary(value=values)))
            self._events.flush()

    def _check_place(self) -> None:
        """Rows that are written to a file without a name are lost, and so would be all that is trained from here on."""
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self._path)):
                return
        except FileNotFoundError:
            pass
        raise UserError(
            f"{self._path} has been deleted, moved or replaced while the run was training. Put it back, with all of "
            f"{self._run_dir}, and run jaxpg resume, or start a new run in another directory."
        )

    def sync(self) -> WrittenRows:
        """Wait until all rows are on the disk; what a checkpoint notes of them."""
        with explain_os_error(self._run_dir):
            os.fsync(self._file.fileno())
        return WrittenRows(self._file.tell(), self._checksum)


class NullWriter:
    """A MetricsWriter that writes nothing, for all processes of a run but the first."""

    def __enter__(self) -> NullWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def write(self, row: Row) -> None:
        """Do nothing."""

    def sync(self) -> WrittenRows:
        """Nothing was written."""
        return WrittenRows()


def _jsonable(value: Any) -> Any:
    """Lists and numbers as JSON has them: float32 in its fewest digits, null for NaN and infinities."""
    if np.ndim(value):
        return [_jsonable(x) for x in value]
    if not np.isfinite(value):
        return None
    return int(value) if np.issubdtype(np.asarray(value).dtype, np.integer) else float(str(value))

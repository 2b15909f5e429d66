"""The directory of a run: what it was told to do, on what it ran, and what it measured.

    config.toml     the resolved config, and the seeds
    run.json        versions, devices and commit of every process that trained it, in order
    metrics.jsonl   one line per chunk of training, every quantity as a list over seeds
    tensorboard/    the means over seeds, as events
    checkpoints/    see checkpoint.py

and, of a text task, vocabulary.json (what its tokens stand for), samples/ and report.html (completions as it went).

The lines of metrics.jsonl are the record; everything that is drawn or compared is read from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxpg.errors import UserError

METRICS, CONFIG, MACHINE = "metrics.jsonl", "config.toml", "run.json"
PACKAGES = ("jaxpg", "jax", "jaxlib", "flax", "optax", "gymnax", "numpy")

Row = dict[str, Any]
"""A line of metrics: name -> [S], and two wall times: `seconds` since the run began, `chunk_seconds` of this chunk."""


class Recorder:
    """Appends rows to metrics.jsonl and to TensorBoard's events; a context manager.

    Args:
        run_dir: the directory of the run.
        keep: bytes of metrics.jsonl that stand, from the checkpoint that the run goes on from; the rest is cut off.
        steps: environment steps at that checkpoint; later events are withdrawn.
    """

    def __init__(self, run_dir: Path, *, keep: int, steps: int) -> None:
        path, events = run_dir / METRICS, run_dir / "tensorboard"
        self._run_dir = run_dir
        with _explained(run_dir):
            path.touch()
            os.truncate(path, keep)
            self._file = path.open("a")
            events.mkdir(exist_ok=True)
            self._events = EventsWriter(str(events / "events"), f".{steps}")  # SummaryWriter hangs on a full disk
            if steps:
                self._events.write_event(Event(step=steps + 1, session_log=SessionLog(status=SessionLog.START)))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for stream in (self._file, self._events):
            with contextlib.suppress(OSError):  # every row was flushed; what is left could not be written
                stream.close()

    def write(self, row: Row) -> None:
        """Append a row; it is with the operating system when this returns."""
        line = json.dumps({name: _jsonable(value) for name, value in row.items()})
        means = {
            name: np.asarray(x, float)[np.isfinite(x)] for name, x in row.items() if name != "steps" and np.ndim(x)
        }
        values = [Summary.Value(tag=name, simple_value=float(x.mean())) for name, x in means.items() if x.size]
        steps = int(np.min(row["steps"]))
        with _explained(self._run_dir):
            self._file.write(line + "\n")
            self._file.flush()
            self._events.write_event(Event(step=steps, wall_time=time.time(), summary=Summary(value=values)))
            self._events.flush()

    @property
    def size(self) -> int:
        """Bytes written to metrics.jsonl."""
        return self._file.tell()


class Unrecorded:
    """A recorder that keeps nothing: of several processes the first alone writes."""

    size = 0

    def __enter__(self) -> Unrecorded:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def write(self, row: Row) -> None:
        """Leave it to the first process."""


def open_directory(run_dir: Path, config: Mapping[str, Any], *, resume: bool) -> None:
    """Begin the directory of a run, or go on with it.

    Raises:
        UserError: it holds a run although none is to be resumed, or another one; or it cannot be written to.
    """
    if (run_dir / CONFIG).exists():
        if not resume:
            raise UserError(f"{run_dir} holds a run already. Add --resume to go on with it, or choose another --out.")
        refuse_other_config(f"The run in {run_dir}", load_config(run_dir), config)
    with _explained(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / CONFIG, dumps(config))


def load_config(run_dir: Path) -> dict[str, Any]:
    """The config that a run wrote down, as it stands in its file."""
    return tomllib.loads((run_dir / CONFIG).read_text())


def add_machine(run_dir: Path, devices: Sequence[jax.Device]) -> None:
    """Note in run.json that this process goes on with the run, on these devices.

    Raises:
        UserError: it cannot be written.
    """
    path = run_dir / MACHINE
    before = json.loads(path.read_text()) if path.exists() else []
    with _explained(run_dir):
        replace_file(path, json.dumps([*before, machine(devices)], indent=1) + "\n")


def refuse_other_config(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise a UserError naming the settings in which two configs differ; a run may go on for longer than planned."""
    before, now = (flatten(tomllib.loads(dumps(config))) for config in (theirs, ours))
    names = [name for name in now | before if before.get(name) != now.get(name) and name != "total_steps"]
    if names:
        shown = "; ".join(f"{n} is {before.get(n, 'absent')!r} there, {now.get(n, 'absent')!r} here" for n in names[:3])
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(f"{what} has another config: {shown}{more}.")


def dumps(tree: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of nested tables of numbers, strings, booleans and lists; None is written as "none"."""
    plain = "".join(f"{key} = {_dump(value)}\n" for key, value in tree.items() if not isinstance(value, Mapping))
    tables = (
        f"\n[{prefix}{key}]\n{dumps(value, f'{prefix}{key}.')}"
        for key, value in tree.items()
        if isinstance(value, Mapping)
    )
    return plain + "".join(tables)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def load_metrics(run_dir: Path) -> dict[str, np.ndarray]:
    """The metrics of a run: name -> [N, S], NaN where a row lacks it; the two wall times are [N].

    A last line that was cut off when the process was killed is left out.

    Raises:
        UserError: there are none.
    """
    path = run_dir / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [row for line in lines if (row := _parse(line)) is not None]
    if not rows:
        raise UserError(f"{run_dir} has no metrics: no run in it got as far as its first chunk.")
    return stack(rows)


def stack(rows: list[Row]) -> dict[str, np.ndarray]:
    """Rows as arrays, see `load_metrics`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    missing = np.full(len(rows[0]["steps"]), np.nan)
    return {name: np.array([row.get(name, missing) for row in rows], float) for name in names}


def machine(devices: Sequence[jax.Device] | None = None) -> dict[str, Any]:
    """What a run depends on besides its config: versions, processor, devices (by default all that there are) and, from
    a checkout, the commit.
    """
    versions = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
    return {
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "devices": [device.device_kind for device in devices or jax.devices()],
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu() -> str:
    """What the processor calls itself."""
    with contextlib.suppress(OSError):
        models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        if models:
            return models[0].partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """The commit of the checkout that this package is run from, with a mark if it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode:
            return None
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return None
    return described.stdout.strip() or None


@contextlib.contextmanager
def _explained(run_dir: Path) -> Iterator[None]:
    """Say in a sentence what the system refused."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"The directory {run_dir} cannot be written to ({reason}). Checkpoints that are in it stay as they are; "
            "make room, or choose another directory with --out."
        ) from error


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _jsonable(value: Any) -> Any:
    """Lists and numbers; float32 in its fewest digits, and null for what JSON does not know."""
    if np.ndim(value):
        return [_jsonable(x) for x in value]
    if not np.isfinite(value):
        return None
    return int(value) if np.issubdtype(np.asarray(value).dtype, np.integer) else float(str(value))


def _dump(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool | str):  # JSON and TOML write these alike
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_dump, value)) + "]"
    return repr(value)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file all at once, so that a killed process leaves the old one or the new one.

    Raises:
        OSError: it could not be written; it names the file, as the system itself does not where a disk is full.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {
        name: [np.nan if x is None else x for x in value] if isinstance(value, list) else value
        for name, value in row.items()
    }

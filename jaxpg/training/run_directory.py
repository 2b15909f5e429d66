"""The directory of a run: its config, the machines it ran on, and its metrics.

    config.toml     the resolved config, and the seeds
    run.json        versions, devices and commit each time it was started or resumed, in order
    metrics.jsonl   one line per chunk of training, every quantity as a list over seeds; before them one line with the
                    evaluation of the initial policy, at step 0, in which `iterations` and `chunk_seconds` are 0
    tensorboard/    the means over seeds, as events
    checkpoints/    see checkpoint.py

`jaxpg train` adds plan.json (what it was asked for), report.html and learning_curve.png. For a text task there are
vocabulary.json (what its tokens stand for), data.json (checksums of its data files), samples/ (completions),
report.html from its first evaluation on, and demonstrations.jsonl or pairs.npz, where its data were sampled.

Every figure and comparison is made from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpg.errors import FEW, UserError
from jaxpg.files import ANOTHER, explain_os_error, flatten, replace_file, toml_dumps
from jaxpg.training import checkpoint, run_files
from jaxpg.training.checkpoint import CHECKPOINTS, Checkpoint
from jaxpg.training.manifests import MANIFEST
from jaxpg.training.metrics_writer import METRICS, TENSORBOARD, Row, WrittenRows
from jaxpg.training.provenance import describe_machine
from jaxpg.training.relocation import relocated
from jaxpg.training.run_files import parse_toml, read_file

CONFIG, MACHINE = "config.toml", "run.json"
SWEEP = "sweep.json"
"""In the directory of a sweep: its scores, see `report.heatmap`."""
WRITTEN = (MACHINE, METRICS, TENSORBOARD, CHECKPOINTS, "samples", "report.html", "learning_curve.png")
"""What is written into the directory of a run besides its config."""
WALL_TIMES = ("seconds", "chunk_seconds")
ADVICE = "Restore it from a backup, or train a new run with another --out."


class ResumePoint(NamedTuple):
    """What a checkpoint of a run notes beside the state: where the run continues.

    rows: of metrics.jsonl.
    seconds: since the run began.
    config: of the run.
    ended: whether a callback has ended the run there.
    """

    rows: WrittenRows = WrittenRows()
    seconds: float = 0.0
    config: Mapping[str, Any] = MappingProxyType({})
    ended: bool = False

    def as_json(self) -> dict[str, Any]:
        """As it is stored, see `resume_point`."""
        return {
            "bytes": self.rows.size,
            "checksum": self.rows.checksum,
            "seconds": self.seconds,
            "config": dict(self.config),
            "ended": self.ended,
        }


STORED = run_files.record(
    absent={"checksum": None, "ended": False},  # of an earlier version
    bytes=run_files.count,
    checksum=run_files.optional(run_files.count),
    seconds=run_files.finite,
    config=run_files.table,
    ended=run_files.flag,
)


def resume_point(found: Checkpoint, like: Mapping[str, Any] | None = None) -> ResumePoint:
    """Where the run of a checkpoint continues. `like` is that of `load_config`.

    Raises:
        UserError: the checkpoint is not of a run.
    """
    try:
        about = STORED("its note", found.about)
    except ValueError as error:
        damage = f"its file {MANIFEST} does not say where the run continues ({error})"
        raise checkpoint.unusable(found.path, damage) from None
    config = _of_this_directory(found.path.parent.parent, about["config"], like)
    return ResumePoint(WrittenRows(about["bytes"], about["checksum"]), about["seconds"], config, about["ended"])


def open_directory(run_dir: Path, config: Mapping[str, Any], *, resume: bool) -> None:
    """Create the directory of a run, or open it to resume the run.

    A config without anything that was trained by it is replaced, unless `resume` is true.

    Raises:
        UserError: it holds a run and `resume` is false, or a run of another config; or it cannot be written to.
    """
    if not resume:
        refuse_begun(run_dir)
    elif (run_dir / CONFIG).exists():
        refuse_other_config(f"The run in {run_dir}", load_config(run_dir, config), config, GOES_ON)
    with explain_os_error(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / CONFIG, toml_dumps(config))


def refuse_foreign_files(run_dir: Path, *, resumes: bool) -> None:
    """Raise a UserError if training in a directory would overwrite what no run has written there.

    That is a symbolic link by a name that a run writes, or such a file where there is neither a run nor, if `resumes`,
    the checkpoint of one.
    """
    for name in (CONFIG, *WRITTEN):
        if (run_dir / name).is_symlink():
            raise UserError(
                f"{run_dir / name} is a symbolic link, and jaxpg does not write through one. Put the file itself "
                f"there, or choose {ANOTHER}."
            )
    if resumes or _is_of_a_run(run_dir):
        return
    for name in (CONFIG, *WRITTEN):
        if (run_dir / name).exists():
            raise _foreign_file(run_dir, name)


def _is_of_a_run(run_dir: Path) -> bool:
    """Whether a config.toml is what a run has written, and not a task of the user's, or another program's."""
    if not (run_dir / CONFIG).exists():
        return False
    if (run_dir / MACHINE).exists() or has_begun(run_dir):
        return True
    try:
        return isinstance(parse_toml((run_dir / CONFIG).read_bytes()).get("algorithm"), str)
    except (OSError, ValueError):
        return False


def refuse_files(directory: Path, names: Sequence[str], command: str) -> None:
    """Raise a UserError if one of the files that a command is to write is there already, and is not its own."""
    for name in names:
        if (directory / name).exists() or (directory / name).is_symlink():
            raise UserError(
                f"{directory} holds a {name}, which {command} would overwrite. Choose another directory with --out."
            )


def add_file(run_dir: Path, name: str, content: str) -> None:
    """Write a file into the directory of a new run, before the run is opened.

    Raises:
        UserError: what is there is not of a run; names it.
    """
    refuse_foreign_files(run_dir, resumes=False)
    path = run_dir / name
    is_own = _is_of_a_run(run_dir) and path.is_file()  # of a run that has not trained yet, see `open_directory`
    if path.exists() and not is_own and (path.is_dir() or path.read_bytes() != content.encode()):
        raise _foreign_file(run_dir, name)
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def _foreign_file(run_dir: Path, name: str) -> UserError:
    """The error for a directory that is of no run but has a file by a name that a run writes."""
    return UserError(f"{run_dir} holds a {name} but no run, so training would overwrite it. Choose {ANOTHER}.")


def check_records(run_dir: Path, rows: WrittenRows) -> None:
    """Check what a run that is resumed appends to: metrics.jsonl and run.json.

    Args:
        run_dir: its directory.
        rows: those that its last checkpoint counted. The file may have more, which are written again.

    Raises:
        UserError: metrics.jsonl is gone, shorter or another one, or has something else than rows; run.json is damaged.
    """
    load_machines(run_dir)
    path = run_dir / METRICS
    if not rows.size and not path.exists():
        return

    def check(content: bytes) -> None:
        if len(content) < rows.size:
            raise ValueError(f"it has {len(content):,} bytes, and the last checkpoint counted {rows.size:,}")
        if rows.checksum is not None and zlib.crc32(content[: rows.size]) != rows.checksum:
            raise ValueError(f"its first {rows.size:,} bytes are not the rows that the last checkpoint counted")
        parsed = _parse_rows(content)
        if not rows.size and (saved := steps_of_a_checkpoint(parsed)):
            raise UserError(
                f"{run_dir} has no checkpoint, although one was written after {saved:,} steps: to go on would delete "
                f"all its metrics. Put {run_dir / CHECKPOINTS} back from a copy, or train a new run with another --out."
            )

    read_file(path, check, ADVICE)


def steps_of_a_checkpoint(rows: Sequence[Row]) -> int:
    """Steps after which a run with these rows wrote a checkpoint, 0 if it need not have written one.

    What is evaluated is saved after its row. So each evaluation in training has a checkpoint, but for that of the last
    row, whose process may have been killed in between, or have diverged.
    """
    evaluated = (int(np.min(row["steps"])) for row in rows[:-1] if "evaluation_return" in row)
    return max(evaluated, default=0)


def close_finished(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Check what a run that is at its end has left, and delete the checkpoints of a process that was killed there.

    Raises:
        UserError: one of its files is damaged, or it has another config; names it.
    """
    refuse_other_config(f"The run in {run_dir}", load_config(run_dir, config), config)
    last = checkpoint.find(run_dir / CHECKPOINTS)
    assert last is not None
    checkpoint.check(last)
    point = resume_point(last, config)
    refuse_other_config(f"The checkpoint {last.path}", point.config, config)
    check_records(run_dir, point.rows)
    checkpoint.prune(run_dir / CHECKPOINTS)


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run goes on from a checkpoint; what it began with is not read again then, and may be gone."""
    manifests = run_dir.glob(f"{CHECKPOINTS}/*/{MANIFEST}")
    return any(checkpoint.NAME.fullmatch(path.parent.name) for path in manifests)


def has_begun(run_dir: Path) -> bool:
    """Whether a run has trained anything: there is a checkpoint, or a row after the one before training."""
    if has_checkpoint(run_dir):
        return True
    if not (run_dir / METRICS).is_file():
        return False
    with (run_dir / METRICS).open("rb") as rows:
        first, second = rows.readline(), rows.readline()
    return bool(second) or (bool(first) and not _is_before_training(first))


def _is_before_training(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is the evaluation before training; a damaged line is not."""
    try:
        return not np.any(_parse_row(line, None)["steps"])
    except ValueError:
        return False


def refuse_begun(run_dir: Path, remedy: str = "Add --resume to continue it, or choose another --out.") -> None:
    """Raise a UserError, with a remedy, if a directory that is to hold a new run has one that has begun."""
    if has_begun(run_dir):
        raise UserError(f"{run_dir} holds a run already. {remedy}")


def check_is_run(run_dir: Path) -> None:
    """Check that a directory is that of a run.

    Raises:
        UserError: it is not. Of a comparison, of stages or of a sweep it says what to name instead.
    """
    if (run_dir / CONFIG).exists():
        return
    if run_dir.is_file() and (run_dir.parent / CONFIG).exists():
        raise UserError(f"{run_dir} is not the directory of a run, but a file of one: name {run_dir.parent}.")
    instead = ""
    if (run_dir / SWEEP).exists():
        instead = (
            f" It is that of a sweep, whose runs differ in their settings: look at its {SWEEP}, or train best.toml."
        )
    elif inner := sorted(path.parent.name for path in run_dir.glob(f"*/{CONFIG}")):
        names = ", ".join(inner if len(inner) <= FEW else [*inner[:FEW], "..."])
        instead = f" There are runs in it: {names}. Name one, such as {run_dir / inner[0]}."
    raise UserError(f"{run_dir} is not the directory of a run: it has no {CONFIG}.{instead}")


def load_config(run_dir: Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The contents of a run's config.toml; paths within the directory that it had are within `run_dir` (relocation.py).

    `like` is the config that it is compared with.

    Raises:
        UserError: it is damaged.
    """

    def parse(content: bytes) -> dict[str, Any]:
        if not (config := parse_toml(content)):  # every run writes its seeds at least
            raise ValueError("it is empty")
        return config

    return _of_this_directory(run_dir, read_file(run_dir / CONFIG, parse, ADVICE), like)


def _of_this_directory(run_dir: Path, config: dict[str, Any], like: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config that was stored in a run, with its paths as they are now."""
    before = [x for machine in load_machines(run_dir) if isinstance(x := machine.get("directory"), str)]
    return relocated(config, before, run_dir, like)


def load_machines(run_dir: Path) -> list[dict[str, Any]]:
    """The machines of a run.json, in the order in which they trained; none without the file.

    Raises:
        UserError: it is damaged.
    """
    path = run_dir / MACHINE
    if not path.exists():
        return []
    parse = partial(run_files.parse_json, check=run_files.list_of(run_files.table))
    return read_file(path, parse, "Delete it to go on without a record of the machines so far.")


def add_machine(run_dir: Path, devices: Sequence[jax.Device]) -> None:
    """Append a description of this machine and these devices to run.json, and where the run lies as it trains there.

    Raises:
        UserError: it cannot be written.
    """
    machines = [*load_machines(run_dir), describe_machine(devices) | {"directory": str(run_dir)}]
    with explain_os_error(run_dir):
        replace_file(run_dir / MACHINE, json.dumps(machines, indent=1) + "\n")


GOES_ON = f" A run goes on with its own settings: leave out those that differ, or choose {ANOTHER} for a new run."
"""What to do where a run that is to be resumed has another config."""


def refuse_other_config(what: str, stored: Mapping[str, Any], current: Mapping[str, Any], remedy: str = "") -> None:
    """Raise a UserError that names up to three settings in which two configs differ.

    `total_steps` may differ: a run may be resumed for longer.
    """
    there, here = (flatten(_plain(config)) for config in (stored, current))
    names = [name for name in here | there if there.get(name) != here.get(name) and name != "total_steps"]
    if names:
        values = [f"{n} is {there.get(n, 'absent')!r} there, {here.get(n, 'absent')!r} here" for n in names[:3]]
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(f"{what} has another config: {'; '.join(values)}{more}.{remedy}")


def _plain(value: Any) -> Any:
    """A setting as config.toml and a manifest give it back."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return "none" if value is None else value


def load_metrics(run_dir: Path) -> dict[str, np.ndarray]:
    """The metrics of a run of S seeds and N rows: name -> [N, S], NaN where a row lacks it; the two wall times are [N].

    An incomplete last line, of a process that was killed, is left out.

    Raises:
        UserError: there are none, the file is damaged, or the run is not there, as after it was moved.
    """
    rows = load_rows(run_dir)
    if not rows:
        check_is_run(run_dir)
        why = "the file is gone or empty" if has_begun(run_dir) else "the run ended before its first chunk was trained"
        raise UserError(f"{run_dir} has no metrics in {METRICS}: {why}.")
    return stack_rows(rows)


def load_rows(run_dir: Path, *, size: int | None = None) -> list[Row]:
    """The rows of metrics.jsonl, none without the file; as `load_metrics`, which stacks them.

    size: the bytes to read, where a checkpoint counted them; all by default.
    """
    path = run_dir / METRICS
    return read_file(path, lambda content: _parse_rows(content[:size]), ADVICE) if path.exists() else []


def stack_rows(rows: list[Row]) -> dict[str, np.ndarray]:
    """Rows as arrays, as in `load_metrics`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    missing = np.full(len(rows[0]["steps"]), np.nan)
    return {name: np.array([row.get(name, missing) for row in rows], float) for name in names}


def _parse_rows(content: bytes) -> list[Row]:
    """The lines of metrics.jsonl, NaN for null; without the last one if it is incomplete.

    Raises:
        ValueError: another line is not a row, or has another number of seeds than the first; says which.
    """
    *lines, last = content.split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parse_row(line, rows[0] if rows else None))
        except ValueError as error:
            raise ValueError(f"line {number} is not a row of metrics: {error}") from None
    with contextlib.suppress(ValueError):
        rows.append(_parse_row(last, rows[0] if rows else None))
    return rows


def _parse_row(line: bytes, first: Row | None) -> Row:
    """One row, which has as many seeds as the `first`."""
    row = run_files.parse_json(line, run_files.table)
    if missing := [name for name in ("steps", *WALL_TIMES) if name not in row]:
        raise ValueError(f"it has no {missing[0]!r}")
    seeds = len(first["steps"]) if first else len(run_files.list_of(run_files.finite)("'steps'", row["steps"]))
    if not seeds:
        raise ValueError("its 'steps' are those of no seed")
    return {
        name: run_files.finite(repr(name), value) if name in WALL_TIMES else _seeds(name, value, seeds)
        for name, value in row.items()
    }


def _seeds(name: str, value: Any, seeds: int) -> list[float]:
    """A quantity of every seed. Checked all at once, since a sweep has millions."""
    if not isinstance(value, list) or len(value) != seeds or not set(map(type, value)) <= {int, float, NoneType}:
        raise ValueError(f"its {name!r} are not {seeds} numbers, one for each seed")
    if any(type(x) is int and abs(x) >= 2**63 for x in value):
        raise ValueError(f"its {name!r} have a number of too many digits")
    return [np.nan if x is None else x for x in value]

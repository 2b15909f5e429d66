"""The record of a command that trains: what it was asked for, written into its directory before anything is trained.

`jaxpg resume` and `--resume` read it, so that going on needs nothing but the directory. It holds resolved configs: a
task file, a default or a package that changes afterwards does not change the command. This module imports nothing that
starts jax: the record names the devices that jax is started with.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpg import files
from jaxpg.errors import UserError
from jaxpg.training import run_files
from jaxpg.training.relocation import is_same, relocated
from jaxpg.training.run_directory import CONFIG

RECORD = "plan.json"
COMMANDS = ("train", "compare", "sweep")
_TABLES = run_files.record(task=run_files.text, algorithm=run_files.text, total_steps=run_files.count)
_GROUP = run_files.record(
    config=_TABLES,
    traced=run_files.list_of(run_files.text),
    places=run_files.list_of(run_files.count),
    points=run_files.list_of(run_files.table),
)
FIELDS = run_files.record(
    absent={"directory": None, "loggers": []},  # of an earlier version
    command=run_files.text,
    command_line=run_files.text,
    task=run_files.text,
    algorithms=run_files.list_of(run_files.text),
    devices=run_files.optional(run_files.text),
    mesh=run_files.optional(run_files.text),
    directory=run_files.optional(run_files.text),
    loggers=run_files.list_of(run_files.text),
    runs=run_files.list_of(run_files.record(directory=run_files.text, config=_TABLES)),
    sweep=run_files.optional(
        run_files.record(
            grid=run_files.table_of(run_files.list_of(lambda name, value: value)),
            memory=run_files.optional(run_files.number),
            groups=run_files.list_of(_GROUP),
            waves=run_files.list_of(run_files.count),
        )
    ),
)
"""What a record has, of which kind; what else is in a config is checked where it is resolved."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What only a sweep was asked for.

    grid: the values of each setting.
    memory: the limit for all devices together, in GiB; None for all there is.
    groups: for each compiled program the tables of its config, the names that are traced, and its points with their
        places in the grid, see `grid.CompiledGroup`.
    waves: how many runs are trained at once, for each group that was begun.
    """

    grid: dict[str, list[Any]]
    memory: float | None
    groups: list[dict[str, Any]]
    waves: list[int]


@dataclass(frozen=True, kw_only=True)
class CommandRecord:
    """What a command was asked for.

    command: of COMMANDS.
    command_line: all of it, as text, for reports.
    task: the task or TOML file that was named.
    algorithms: the algorithms that were named.
    devices, mesh: --devices and --mesh.
    runs: in training order, each with its `directory` within that of the command, and the tables of its `config`; of a
        sweep only the stages before it.
    sweep: None for the other commands.
    directory: that of the command, as it was named; None in records of earlier versions.
    loggers: where else its runs are logged, see `loggers.LOGGERS`.
    """

    command: str
    command_line: str
    task: str
    algorithms: list[str]
    devices: str | None
    mesh: str | None
    runs: list[dict[str, Any]]
    sweep: Sweep | None = None
    directory: str | None = None
    loggers: list[str] = dataclasses.field(default_factory=list)


def to_json(record: CommandRecord) -> str:
    """The record as text, with a checksum."""
    fields = dataclasses.asdict(record)
    if record.directory is None:
        del fields["directory"]
    if not record.loggers:
        del fields["loggers"]
    text = json.dumps(fields, indent=1)
    return f'{{"checksum": {zlib.crc32(text.encode())}, "record": {text}}}\n'


def write(record: CommandRecord, out: Path) -> None:
    """Write the record into the directory of a command, atomically.

    Raises:
        UserError: it cannot be written.
    """
    with files.explain_os_error(out):
        files.replace_file(out / RECORD, to_json(record))


def read(out: Path) -> CommandRecord | None:
    """The record in a directory, None if there is none; paths in it are those of today (training/relocation.py).

    Raises:
        UserError: it is damaged, or was written by another version of jaxpg.
    """
    path = out / RECORD
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["record"]
        FIELDS("the record", fields)
        sweep = fields.pop("sweep")
        record = CommandRecord(**fields, sweep=None if sweep is None else Sweep(**sweep))
        intact = to_json(record) == path.read_text(encoding="utf-8")
        intact &= _is_of_a_command(record) and all(_is_within(run["directory"]) for run in record.runs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        remedy = (
            f"Delete it to go on with the run in {out} alone."
            if (out / CONFIG).is_file()
            else "Its runs can be looked at and be resumed one by one."
        )
        raise UserError(
            f"{path} is damaged, or another version of jaxpg wrote it, so what it was asked for is lost. {remedy} To "
            "start over, choose another --out."
        )
    return _of_this_directory(record, out)


def _of_this_directory(record: CommandRecord, out: Path) -> CommandRecord:
    """The record with the paths of its configs within `out`, where they were within the directory that it had."""
    before = record.directory
    if before is None or is_same(before, out):
        return record

    def moved(held: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**each, "config": relocated(each["config"], [before], out)} for each in held]

    sweep = dataclasses.replace(record.sweep, groups=moved(record.sweep.groups)) if record.sweep else None
    return dataclasses.replace(record, runs=moved(record.runs), sweep=sweep, directory=str(out))


def _is_of_a_command(record: CommandRecord) -> bool:
    """Whether there is such a command, and it has something to train."""
    trained = record.sweep.groups if record.sweep else record.runs
    is_sweep = record.sweep is not None
    return record.command in COMMANDS and is_sweep == (record.command == "sweep") and all((record.algorithms, trained))


def _is_within(directory: str) -> bool:
    """Whether a path stays within the directory that it is relative to."""
    return not Path(directory).is_absolute() and ".." not in Path(directory).parts

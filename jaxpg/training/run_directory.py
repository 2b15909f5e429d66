"""The directory of a run: its config, the machines it ran on, and its metrics.

    config.toml     the resolved config, and the seeds
    run.json        versions, devices and commit each time it was started or resumed, in order
    metrics.jsonl   one line per chunk of training, every quantity as a list over seeds
    tensorboard/    the means over seeds, as events
    checkpoints/    see checkpoint.py

and, for a text task, vocabulary.json (what its tokens stand for), samples/ (completions) and report.html.

Every figure and comparison is made from metrics.jsonl.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpg.errors import UserError
from jaxpg.files import explain_os_error, flatten, replace_file, toml_dumps
from jaxpg.training import checkpoint
from jaxpg.training.metrics_writer import METRICS, Row
from jaxpg.training.provenance import describe_machine

CONFIG, MACHINE = "config.toml", "run.json"


def open_directory(run_dir: Path, config: Mapping[str, Any], *, resume: bool) -> None:
    """Create the directory of a run, or open it to resume the run.

    A config without anything that was trained by it is replaced, unless `resume` is true.

    Raises:
        UserError: it holds a run and `resume` is false, or a run of another config; or it cannot be written to.
    """
    if not resume:
        refuse_begun(run_dir)
    elif (run_dir / CONFIG).exists():
        refuse_other_config(f"The run in {run_dir}", load_config(run_dir), config)
    with explain_os_error(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / CONFIG, toml_dumps(config))


def has_begun(run_dir: Path) -> bool:
    """Whether a run has trained anything: there are metrics or a checkpoint."""
    metrics, manifests = run_dir / METRICS, run_dir.glob(f"{checkpoint.CHECKPOINTS}/*/{checkpoint.MANIFEST}")
    return (metrics.exists() and metrics.stat().st_size > 0) or any(manifests)


def refuse_begun(run_dir: Path) -> None:
    """Raise a UserError if a directory that is to hold a new run has one that has begun."""
    if has_begun(run_dir):
        raise UserError(f"{run_dir} holds a run already. Add --resume to go on with it, or choose another --out.")


def load_config(run_dir: Path) -> dict[str, Any]:
    """The contents of a run's config.toml."""
    return tomllib.loads((run_dir / CONFIG).read_text())


def add_machine(run_dir: Path, devices: Sequence[jax.Device]) -> None:
    """Append a description of this machine and these devices to run.json.

    Raises:
        UserError: it cannot be written.
    """
    path = run_dir / MACHINE
    earlier = json.loads(path.read_text()) if path.exists() else []
    with explain_os_error(run_dir):
        replace_file(path, json.dumps([*earlier, describe_machine(devices)], indent=1) + "\n")


def refuse_other_config(what: str, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise a UserError that names up to three settings in which two configs differ.

    `total_steps` may differ: a run may be resumed for longer.
    """
    there, here = (flatten(tomllib.loads(toml_dumps(config))) for config in (stored, current))
    names = [name for name in here | there if there.get(name) != here.get(name) and name != "total_steps"]
    if names:
        values = [f"{n} is {there.get(n, 'absent')!r} there, {here.get(n, 'absent')!r} here" for n in names[:3]]
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(f"{what} has another config: {'; '.join(values)}{more}.")


def load_metrics(run_dir: Path) -> dict[str, np.ndarray]:
    """The metrics of a run of S seeds and N rows: name -> [N, S], NaN where a row lacks it; the two wall times are [N].

    An incomplete last line, of a process that was killed, is left out.

    Raises:
        UserError: there are none.
    """
    path = run_dir / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [row for line in lines if (row := _parse(line)) is not None]
    if not rows:
        raise UserError(f"{run_dir} has no metrics: the run ended before its first chunk was trained.")
    return stack_rows(rows)


def stack_rows(rows: list[Row]) -> dict[str, np.ndarray]:
    """Rows as arrays, as in `load_metrics`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    missing = np.full(len(rows[0]["steps"]), np.nan)
    return {name: np.array([row.get(name, missing) for row in rows], float) for name in names}


def _parse(line: str) -> Row | None:
    """A line of metrics.jsonl, NaN for null; None if it is incomplete."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {
        name: [np.nan if x is None else x for x in value] if isinstance(value, list) else value
        for name, value in row.items()
    }

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

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpg.errors import UserError
from jaxpg.files import explain_os_error, flatten, replace_file, toml_dumps
from jaxpg.training.metrics_writer import METRICS, Row
from jaxpg.training.provenance import describe_machine

CONFIG, MACHINE = "config.toml", "run.json"


def open_directory(run_dir: Path, config: Mapping[str, Any], *, resume: bool) -> None:
    """Begin the directory of a run, or go on with it.

    Raises:
        UserError: it holds a run although none is to be resumed, or another one; or it cannot be written to.
    """
    if (run_dir / CONFIG).exists():
        if not resume:
            raise UserError(f"{run_dir} holds a run already. Add --resume to go on with it, or choose another --out.")
        refuse_other_config(f"The run in {run_dir}", load_config(run_dir), config)
    with explain_os_error(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / CONFIG, toml_dumps(config))


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
    with explain_os_error(run_dir):
        replace_file(path, json.dumps([*before, describe_machine(devices)], indent=1) + "\n")


def refuse_other_config(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise a UserError naming the settings in which two configs differ; a run may go on for longer than planned."""
    before, now = (flatten(tomllib.loads(toml_dumps(config))) for config in (theirs, ours))
    names = [name for name in now | before if before.get(name) != now.get(name) and name != "total_steps"]
    if names:
        shown = "; ".join(f"{n} is {before.get(n, 'absent')!r} there, {now.get(n, 'absent')!r} here" for n in names[:3])
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(f"{what} has another config: {shown}{more}.")


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


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {
        name: [np.nan if x is None else x for x in value] if isinstance(value, list) else value
        for name, value in row.items()
    }

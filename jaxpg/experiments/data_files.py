"""The data files of a run: what they held when it began, so that it does not go on with others."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

from jaxpg.envs.text.jsonl_reader import read_content
from jaxpg.errors import UserError
from jaxpg.experiments.build import kind_of
from jaxpg.experiments.config import Config
from jaxpg.parallel import processes
from jaxpg.training import run_directory, run_files

CHECKSUMS = "data.json"


def save_checksums(config: Config, run_dir: Path) -> None:
    """Write SHA-256 of a new run's data files into its directory; compare those of a run that goes on.

    Raises:
        UserError: a file has changed or is gone; or there is no run, but another file by a name that a run writes.
    """
    path = run_dir / CHECKSUMS
    if not run_directory.has_begun(run_dir):
        if (checksums := _checksums(config)) and processes.is_main_process():
            run_directory.add_file(run_dir, CHECKSUMS, json.dumps(checksums) + "\n")
    elif path.exists():
        parse = partial(run_files.parse_json, check=run_files.table)
        began_with = run_files.read_file(path, parse, run_directory.ADVICE)
        for name, checksum in _checksums(config).items():
            if began_with.get(name, checksum) != checksum:
                raise UserError(
                    f"{name} has changed since the run in {run_dir} began, so the run would not go on as it was. "
                    "Restore the earlier file, or train a new run."
                )


def _checksums(config: Config) -> dict[str, str]:
    """Of each file with records that a config reads, by the name that it has there."""
    section = kind_of(config).data
    names = config.environment_settings.get("path"), getattr(config, section).get("file") if section else None
    return {name: hashlib.sha256(read_content(name)).hexdigest() for name in names if isinstance(name, str)}

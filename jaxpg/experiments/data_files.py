"""What a run reads again whenever it goes on: its data files and reward models, as they were when it began."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from jaxpg.envs.text.jsonl_reader import read_content
from jaxpg.errors import UserError
from jaxpg.experiments.build import kind_of
from jaxpg.experiments.config import Config
from jaxpg.parallel import processes
from jaxpg.training import checkpoint, run_directory, run_files
from jaxpg.training.manifests import MANIFEST

CHECKSUMS = "data.json"


def save_checksums(config: Config, run_dir: Path) -> None:
    """Write SHA-256 of what a new run reads into its directory; compare those of a run that goes on.

    Raises:
        UserError: a file has changed or is gone, or a reward model has been trained on or replaced; or there is no run,
            but another file by a name that a run writes.
    """
    checksums = _of_files(config) | _of_models(config)
    if run_directory.has_begun(run_dir):
        if changed := _changed(run_dir, checksums):
            raise UserError(
                f"{changed[0]} has changed since the run in {run_dir} began, so the run would not go on as it was. "
                "Restore what was there, or train a new run."
            )
    elif checksums and processes.is_main_process():
        run_directory.add_file(run_dir, CHECKSUMS, json.dumps(checksums) + "\n")


def changed_models(config: Config, run_dir: Path) -> list[str]:
    """The reward models of a run that are not those that it was trained with, "The model of reward" for instance."""
    return _changed(run_dir, _of_models(config))


def _changed(run_dir: Path, checksums: Mapping[str, str]) -> list[str]:
    """What has another checksum now than when the run began."""
    path = run_dir / CHECKSUMS
    if not (checksums and path.exists()):
        return []
    parse = partial(run_files.parse_json, check=run_files.table)
    began_with = run_files.read_file(path, parse, run_directory.ADVICE)
    return [name for name, checksum in checksums.items() if began_with.get(name, checksum) != checksum]


def _of_files(config: Config) -> dict[str, str]:
    """Of each file with records that a config reads, by the name that it has there."""
    section = kind_of(config).data
    names = config.environment_settings.get("path"), getattr(config, section).get("file") if section else None
    return {name: hashlib.sha256(read_content(name)).hexdigest() for name in names if isinstance(name, str)}


def _of_models(config: Config) -> dict[str, str]:
    """Of the last checkpoint of each reward model, by the setting that names it: of its manifest, which has checksums.

    One that cannot be read is left to those who read all of it.
    """
    found = {name: checkpoint.find(Path(run) / checkpoint.CHECKPOINTS) for name, run in config.reward_models.items()}
    manifests = {name: last.path / MANIFEST for name, last in found.items() if last}
    return {f"The model of {n}": hashlib.sha256(path.read_bytes()).hexdigest() for n, path in manifests.items()}

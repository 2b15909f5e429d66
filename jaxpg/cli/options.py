"""What the command line says about the runs that a command trains, read once from its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpg.cli import devices
from jaxpg.cli.devices import DeviceOptions
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.config_file import parse_overrides
from jaxpg.training import run_directory


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments of a command that trains.

    Args:
        task: the name of a task, or a TOML file.
        overrides: settings that win over the task's: --set, --steps, --seeds, --seed, --from and --reward.
        out: the directory to write to, None for a new one in runs/.
        resume: go on with the run in `out`.
        quiet: show no progress.
        devices: --devices, --mesh and the options of several processes.
    """

    task: str
    overrides: Mapping[str, Any]
    out: Path | None
    resume: bool
    quiet: bool
    devices: DeviceOptions


def read_run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options in the arguments of train, compare or sweep.

    Raises:
        UserError: a setting without a value, or an invalid number of seeds.
    """
    return RunOptions(
        task=arguments.task,
        overrides=_overrides(arguments),
        out=arguments.out,
        resume=arguments.resume,
        quiet=arguments.quiet,
        devices=devices.from_arguments(arguments),
    )


def config_of_run(options: RunOptions, algorithm: str, directory: Path | None) -> configs.Config:
    """The config of a run in `directory`: the task's, or, when the run is resumed, its own; overrides win over both.

    Raises:
        UserError: as `resolve_config`; no directory to resume in, one with a run of another task or algorithm, or more
            steps for a run whose learning rate is annealed.
    """
    if not options.resume:
        return configs.resolve_config(options.task, algorithm, options.overrides)
    if directory is None:
        raise UserError("--resume needs --out, the directory of the run to go on with.")
    if not (directory / run_directory.CONFIG).exists():
        return configs.resolve_config(options.task, algorithm, options.overrides)
    begun, wanted = configs.load_config(directory), configs.resolve_config(options.task, algorithm)
    if (begun.task, begun.algorithm) != (wanted.task, wanted.algorithm):
        raise UserError(
            f"The run in {directory} is of {begun.algorithm} on {begun.task}, not {wanted.algorithm} on {wanted.task}."
        )
    config = configs.resolve_config(directory / run_directory.CONFIG, algorithm, options.overrides)
    _refuse_annealed(begun, config, directory)
    return config


def _refuse_annealed(begun: configs.Config, config: configs.Config, directory: Path) -> None:
    """Raise a UserError if a run is to go on for longer with a learning rate that has fallen to zero."""
    over = config.settings.get("anneal_steps")
    if config.total_steps > begun.total_steps and over is not None and over < config.total_steps:
        raise UserError(
            f"The run in {directory} anneals its learning rate to zero over {over:,} steps, so it would learn nothing "
            f"from there to {config.total_steps:,}. Train a new run for as long, or one that starts from this policy: "
            f"--from {directory} with another --out."
        )


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    overrides = parse_overrides(arguments.set)
    if arguments.steps is not None:
        overrides["total_steps"] = arguments.steps
    if arguments.seeds is not None or arguments.seed:
        seeds = range(arguments.seed, arguments.seed + (1 if arguments.seeds is None else arguments.seeds))
        configs.check_seeds(seeds)
        overrides["seeds"] = list(seeds)
    if arguments.initial is not None:
        overrides["initial"] = arguments.initial
    if arguments.reward is not None:
        overrides["reward"] = arguments.reward
    return overrides

"""What the command line says about the runs that a command trains, read once from its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpg.cli import devices
from jaxpg.cli.devices import DeviceOptions
from jaxpg.errors import UserError
from jaxpg.experiments.config import check_seeds, resolve_config
from jaxpg.experiments.config_file import parse_overrides
from jaxpg.experiments.grid import parse_grid


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments of a command that trains.

    Args:
        command: train, compare, sweep or resume.
        task: the name of a task, or a TOML file; None for resume.
        algorithms: the algorithms, each once; none for resume.
        overrides: settings that win over the task's: --set, --steps, --seeds, --seed, --from and --reward.
        out: the directory to write to, None for a new one in runs/.
        resume: continue what is in `out`.
        grid: the values of the settings of a sweep, None for other commands.
        memory: the limit of a sweep for all devices together, in GiB.
        quiet: show no progress.
        loggers: what else logs the runs, --wandb and --tensorboard.
        devices: --devices, --mesh and the options of several processes.
    """

    command: str
    task: str | None
    algorithms: tuple[str, ...]
    overrides: Mapping[str, Any]
    out: Path | None
    resume: bool
    grid: Mapping[str, Sequence[Any]] | None
    memory: float | None
    quiet: bool
    loggers: tuple[str, ...]
    devices: DeviceOptions


def read_run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options in the arguments of train, compare, sweep or resume.

    Raises:
        UserError: a setting without a value, an invalid number of seeds or grid, or nothing to resume in.
    """
    if arguments.resume and arguments.out is None:
        raise UserError("--resume needs --out, the directory of the run to resume.")
    if arguments.command == "sweep" and arguments.loggers:
        raise UserError(f"A sweep takes no --{arguments.loggers[0]}: its scores are in sweep.json.")
    return RunOptions(
        command=arguments.command,
        task=arguments.task,
        algorithms=tuple(dict.fromkeys(arguments.algorithms)),
        overrides=overrides_of(arguments),
        out=arguments.out,
        resume=arguments.resume,
        grid=None if arguments.grid is None else parse_grid(arguments.grid),
        memory=arguments.memory,
        quiet=arguments.quiet,
        loggers=tuple(arguments.loggers or ()),
        devices=devices.from_arguments(arguments),
    )


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that win over the task's: --set, --steps, --seeds, --seed, --from and --reward.

    Raises:
        UserError: a setting is given in two ways, or one of them cannot be read.
    """
    by_option: dict[str, Any] = {}
    if arguments.steps is not None:
        by_option["total_steps"] = arguments.steps
    if arguments.seeds is not None or arguments.seed is not None:
        first = arguments.seed or 0
        seeds = range(first, first + (_seeds_of_task(arguments) if arguments.seeds is None else arguments.seeds))
        check_seeds(seeds)
        by_option["seeds"] = list(seeds)
    if arguments.initial is not None:
        by_option["initial"] = arguments.initial
    if arguments.reward is not None:
        by_option["reward"] = arguments.reward
    overrides = parse_overrides(arguments.set)
    if twice := sorted(by_option.keys() & overrides.keys()):
        raise UserError(
            f"{twice[0]} is given twice, by --set {twice[0]}=... and by an option of its own: leave one of them out."
        )
    return overrides | by_option


def _seeds_of_task(arguments: argparse.Namespace) -> int:
    """How many seeds a task has for these algorithms.

    Raises:
        UserError: one of them has more than another.
    """
    found = {name: len(resolve_config(arguments.task, name).seeds) for name in arguments.algorithms}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in found.items())
        raise UserError(f"--seed needs --seeds, since the algorithms have other numbers of seeds here: {listed}.")
    return next(iter(found.values()))

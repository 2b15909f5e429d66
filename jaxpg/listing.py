"""`jaxpg list`: tables of what there is, read off the configs, the ladder and its docstrings."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from jaxpg import config as configs
from jaxpg import ladder, options
from jaxpg.errors import UserError


def show(arguments: argparse.Namespace) -> int:
    """List what there is."""
    if arguments.what == "options":
        if not arguments.algorithm:
            raise UserError("Whose options? Say for instance: jaxpg list options ppo.")
        tables = [_options(arguments.algorithm)]
    else:
        listings = {"tasks": _tasks, "algorithms": _algorithms, "environments": _environments}
        tables = [listings[name]() for name in ([arguments.what] if arguments.what else ["tasks", "algorithms"])]
    console = Console()
    for table in tables:
        console.print(table)
    return 0


def _tasks() -> Table:
    table = Table("task", "environment", "steps", "solved at", title="tasks", box=box.SIMPLE_HEAD)
    for name in configs.tasks():
        config = configs.resolve(name, "ppo")
        solved = "" if config.threshold is None else f"{config.threshold:g}"
        table.add_row(name, config.environment, f"{config.total_steps:,}", solved)
    return table


def _algorithms() -> Table:
    table = Table("algorithm", "parent", "what it is", title="algorithms", box=box.SIMPLE_HEAD)
    for name, algorithm in configs.ALGORITHMS.items():
        table.add_row(name, ladder.PARENT.get(name) or "", (algorithm.__doc__ or "").strip().splitlines()[0])
    return table


def _environments() -> Table:
    from jaxpg import envs

    table = Table("environment", title="environments", box=box.SIMPLE_HEAD)
    for name in envs.names():
        table.add_row(name)
    return table


def _options(algorithm: str) -> Table:
    table = Table("setting", "default", "meaning", title=f"settings of {algorithm}", box=box.SIMPLE_HEAD)
    groups: list[tuple[str, dict[str, options.Option]]] = [
        ("", configs.algorithm_options(algorithm)),
        ("", configs.task_options()),
        *((f"network.{{{kind}}}.", options.options(network)) for kind, network in configs.NETWORKS.items()),
    ]
    for prefix, group in groups:
        for option in group.values():
            default = "" if option.default is options.REQUIRED else str(option.default)
            table.add_row(prefix + option.name, default, option.meaning)
        table.add_section()
    return table

"""`jaxpg list`: tables of tasks, algorithms and settings, read off the configs, signatures and docstrings."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxpg import envs
from jaxpg.envs import host, suites
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.experiments import config as configs
from jaxpg.experiments import config_file, parts, signatures
from jaxpg.files import setting_text
from jaxpg.ladder_settings import PARENTS
from jaxpg.runs.terminal import make_console
from jaxpg.user_input.printable import printable

_HOST = {
    "gymnasium": ("Gymnasium", "any of its IDs, and my_module:MyEnv-v0"),
    "envpool": ("EnvPool", "Pong-v5, Breakout-v5"),
}
"""The packages of `envs.host`: library and examples."""


def run_list(arguments: argparse.Namespace) -> int:
    """Print the tables that were named, or those of tasks and algorithms."""
    if arguments.what == "options" and not arguments.of:
        raise UserError("list options needs an algorithm, such as: jaxpg list options ppo.")
    if arguments.what not in ("options", "environments") and arguments.of:
        raise UserError(f"list {arguments.what} takes no algorithm; list options {arguments.of} does.")
    listings: dict[str, Callable[[], Any]] = {
        "tasks": _task_table,
        "algorithms": _algorithm_table,
        "options": lambda: _option_table(arguments.of),
        "environments": lambda: _suite_table(arguments.of) if arguments.of else _all_environments(),
        "wrappers": _wrapper_table,
        **{name: partial(_data_table, name) for name in configs.DATA},
    }
    console = make_console(full_width=True)
    for name in [arguments.what] if arguments.what else ["tasks", "algorithms"]:
        console.print(listings[name]())
    if not arguments.what:
        console.print(
            "There is more: jaxpg list options ALGO, environments, wrappers, pairs, step_labels or demonstrations."
        )
    return 0


def _table(title: str, *columns: str) -> Table:
    """A table that loses no letter of a name and no digit in a narrow terminal."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _task_table() -> Table:
    table = _table("tasks", "task", "environment", "steps", "solved at")
    for name in config_file.tasks():
        config = configs.resolve_config(name, "ppo")
        solved = "" if config.threshold is None else f"{config.threshold:g}"
        table.add_row(name, config.environment, f"{config.total_steps:,}", solved)
    return table


def _algorithm_table() -> Table:
    table = _table("algorithms", "algorithm", "parent", "what it is")
    for name, algorithm in parts.ALGORITHMS.items():
        table.add_row(name, PARENTS.get(name, ""), _first_line(algorithm))
    return table


def _all_environments() -> Group:
    return Group(_environment_table(), _suites_table(), suites.ABSENT)


def _suites_table() -> Table:
    """The suites of other libraries; nothing is imported."""
    table = _table("other libraries", "environment", "library", "such as", "remark", "")
    for prefix, suite in suites.SUITES.items():
        there = f"jaxpg list environments {prefix}" if suites.is_installed(prefix) else suites.install_command(prefix)
        table.add_row(f"{prefix}:ID", suite.name, suite.examples, suite.remark, there)
    for prefix, (library, examples) in _HOST.items():
        is_there = importlib.util.find_spec(prefix) is not None
        there = f"jaxpg list environments {prefix}" if is_there else suites.install_command(prefix)
        table.add_row(f"{prefix}:ID", library, examples, "stepped on the host", there)
    return table


def _suite_table(prefix: str) -> Group:
    if prefix not in (known := (*suites.SUITES, *_HOST)):
        refuse_unknown("suite", prefix, known)
    table, missing = _table(prefix, "environment", "its settings and their defaults"), _Missing()
    table.columns[0].no_wrap = True
    for name in host.ids(prefix) if prefix in _HOST else suites.ids(prefix):
        table.add_row(printable(f"{prefix}:{name}"), _defaults(f"{prefix}:{name}", missing))
    return Group(table, *missing.notes())


def _environment_table() -> Group:
    columns = "environment", "its settings and their defaults", "beside Gymnasium's"
    table, missing = _table("environments", *columns), _Missing()
    table.columns[0].no_wrap = True
    for name in envs.names():
        table.add_row(printable(name), _defaults(name, missing), envs.NOTES.get(name, ""))
    return Group(table, *missing.notes())


class _Missing:
    """Why environments cannot be made, such as without their data: each reason once, with a number."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def number_of(self, environment: str, error: UserError) -> int:
        """The number of the reason, which does not name the environment."""
        reason = str(error).replace(f"The environment {environment} ", "")
        if reason not in self._reasons:
            self._reasons.append(reason)
        return self._reasons.index(reason) + 1

    def notes(self) -> list[Text]:
        """Each reason in a line."""
        return [Text(printable(f"({number}) {reason}")) for number, reason in enumerate(self._reasons, start=1)]


def _defaults(environment: str, missing: _Missing) -> str:
    try:
        settings = envs.default_settings(environment)
    except UserError as error:
        return f"({missing.number_of(environment, error)}) see below"
    shown = [name if x is signatures.REQUIRED else f"{name} = {_plain(x)}" for name, x in settings.items()]
    return printable(", ".join(shown))


def _plain(value: Any) -> str:
    """A default of an environment's setting, which may be an array."""
    return setting_text(value.tolist() if isinstance(value, np.ndarray | np.generic | jax.Array) else value)


def _wrapper_table() -> Table:
    table = _table("wrappers", "wrapper", "setting", "default", "meaning")
    for name, wrapper in envs.WRAPPERS.items():
        table.add_row(name, "", "", _first_line(wrapper))
        for option in signatures.options(wrapper).values():
            table.add_row("", option.name, _default(option), option.meaning)
    return table


def _data_table(name: str) -> Table:
    make, data = configs.DATA[name]
    return _setting_table(f"settings of {data}", [(f"{name}.", signatures.options(make))])


def _option_table(algorithm: str) -> Table:
    groups = [
        ("", parts.algorithm_options(algorithm)),
        ("", configs.task_options()),
        *(
            (f"network.{{{kind}}}.", signatures.options(network))
            for kind, network in parts.networks_of(algorithm).items()
        ),
    ]
    return _setting_table(f"settings of {algorithm}", groups)


def _setting_table(title: str, groups: Sequence[tuple[str, Mapping[str, signatures.Option]]]) -> Table:
    """Settings in groups; the prefix of a group is the path to its table in a config."""
    table = _table(title, "setting", "default", "meaning")
    table.columns[0].no_wrap = True
    for prefix, group in groups:
        for option in group.values():
            table.add_row(prefix + option.name, _default(option), option.meaning)
        table.add_section()
    return table


def _default(option: signatures.Option) -> str:
    return "" if option.default is signatures.REQUIRED else setting_text(option.default)


def _first_line(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]  # python -OO has no docstrings

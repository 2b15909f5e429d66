"""The code of one's own that a command may execute: what its user names, and with `--trust-code` what a run names."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from jaxpg.experiments import config_file
from jaxpg.experiments.grid import parse_grid
from jaxpg.user_input.user_code import strings_in


def trusted_by(arguments: argparse.Namespace) -> Callable[[str], bool]:
    """Whether a command may import a name "module:function", for `user_code.trust`.

    The user names what stands in --set, in --grid, in the task's file, as an algorithm and as the environment of check;
    a run directory that the command reads, also that of --resume, may come from elsewhere and does not speak for the
    user.

    Raises:
        UserError: there is no such task, or its file, --set or --grid cannot be read.
    """
    given = vars(arguments)
    if given.get("trust_code"):
        return lambda name: True
    tables = config_file.read_task(given["task"])[0] if given.get("task") else {}
    stated = [
        tables,
        given.get("environment"),
        given.get("algorithms"),
        given.get("of"),
        config_file.nested(config_file.parse_overrides(given.get("set", []))),
        parse_grid(given.get("grid") or []),
    ]
    return frozenset(strings_in(stated)).__contains__

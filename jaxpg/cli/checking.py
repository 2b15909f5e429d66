"""`jaxpg check`: the battery over an environment, a line for everything that was looked at."""

from __future__ import annotations

import argparse

from jaxpg import envs
from jaxpg.cli import signals
from jaxpg.experiments.config_file import parse_overrides
from jaxpg.experiments.signatures import check_free_settings
from jaxpg.runs.terminal import make_console
from jaxpg.user_input.printable import printable


def run_check(arguments: argparse.Namespace) -> int:
    """Print the findings; 2 if something is wrong for certain, else 0."""
    settings = parse_overrides(arguments.set)
    check_free_settings("environment_settings", settings)
    env = envs.make_unchecked(arguments.environment, **settings)
    console = make_console(soft_wrap=True)
    marks, wrong = {True: "✓", None: "?", False: "✗"}, False
    with signals.ends_at_once():
        for finding in envs.battery(env, arguments.environment):
            console.print(f"{marks[finding.passed]} {printable(finding.sentence)}")
            wrong |= finding.passed is False
    return 2 if wrong else 0

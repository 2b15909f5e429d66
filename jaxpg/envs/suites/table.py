"""The table of suites: a prefix is the name of the adapter in this folder and of the extra that installs its library.

An adapter is a module with three functions: `ids()`, the environments that there are; `default_settings(id)`, what each
takes, with defaults; `make(id, settings)`, the Env.

A name "brax:ant" looks like a function of a module, "package.module:function". The prefix of a suite wins, whatever is
installed or on PYTHONPATH, so that such a name means the same everywhere and runs no code of a user. A module that has
the name of a suite can be reached inside of a package: "mine.brax:ant".
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any, NamedTuple

import jax

from jaxpg.errors import UserError, refuse_unknown
from jaxpg.types import Env
from jaxpg.user_input.user_code import SUITE_PREFIXES, explain_failure


class Suite(NamedTuple):
    """A library of environments.

    name: of the library.
    package: what Python imports.
    examples: some of its environments.
    remark: what its adapter leaves out or adds.
    """

    name: str
    package: str
    examples: str
    remark: str


SUITES: dict[str, Suite] = {
    "brax": Suite("Brax", "brax", "ant, halfcheetah, inverted_pendulum", "backend = spring, positional, mjx, ..."),
    "craftax": Suite("Craftax", "craftax", "Craftax-Symbolic-v1, Craftax-Classic-Symbolic-v1", ""),
    "jaxtari": Suite("JAXtari", "jaxtari", "pong, breakout, seaquest", "needs sprites that you install"),
    "jumanji": Suite("Jumanji", "jumanji", "Snake-v1, Maze-v0, RubiksCube-v0", "one agent; action masks"),
    "navix": Suite("Navix", "navix", "Navix-Empty-5x5-v0, Navix-DoorKey-8x8-v0", ""),
    "pgx": Suite("PGX", "pgx", "tic_tac_toe, connect_four, 2048", "the others play at random; action masks"),
    "playground": Suite(
        "MuJoCo Playground", "mujoco_playground", "CartpoleBalance, CheetahRun", "the DeepMind Control Suite"
    ),
}
"""Libraries of environments by prefix."""

ABSENT = "Not there: Kinetix. kinetix-env 3.0.2 cannot be installed with the versions of libraries that jaxpg needs."
"""What has been tried and does not work together with jaxpg."""

assert set(SUITES) == SUITE_PREFIXES


def is_suite_name(name: str) -> bool:
    """Whether a name begins with the prefix of a suite: "brax:ant"."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix in SUITES


def is_installed(prefix: str) -> bool:
    """Whether the library of a suite is installed; it is not imported."""
    return importlib.util.find_spec(SUITES[prefix].package) is not None


def install_command(prefix: str) -> str:
    """What installs the library of a suite."""
    return f"pip install 'jaxpg[{prefix}]'"


def ids(prefix: str) -> list[str]:
    """The environments of a suite, without the prefix.

    Raises:
        UserError: there is no such suite, or its library is not installed.
    """
    if prefix not in SUITES:
        refuse_unknown("suite", prefix, SUITES)
    return sorted(_adapter(prefix).ids())


def default_settings(name: str) -> dict[str, Any]:
    """The settings of an environment "suite:id", with their defaults.

    Raises:
        UserError: the library is not installed, or has no such environment.
    """
    prefix, _, of_the_suite = name.partition(":")
    known = ids(prefix)
    if of_the_suite not in known:
        refuse_unknown(f"environment of {SUITES[prefix].name}", of_the_suite, known)
    with explain_failure(f"The settings of {name} cannot be read: {SUITES[prefix].name}"):
        return _adapter(prefix).default_settings(of_the_suite)


def make(name: str, settings: dict[str, Any]) -> Env:
    """The environment "suite:id" with these settings, which are among `default_settings` and have their types.

    Raises:
        UserError: as `default_settings`; the library refuses the values.
    """
    prefix, _, of_the_suite = name.partition(":")
    adapter = _adapter(prefix)
    with explain_failure(f"{name} cannot be made: {SUITES[prefix].name}"), jax.numpy_rank_promotion("allow"):
        return adapter.make(of_the_suite, adapter.default_settings(of_the_suite) | settings)._replace(name=name)


def _adapter(prefix: str) -> ModuleType:
    """The module of a suite, imported on first use."""
    suite = SUITES[prefix]
    if not is_installed(prefix):
        raise UserError(f"{prefix}: {suite.name} is not installed. Install it by: {install_command(prefix)}.")
    with explain_failure(f"{suite.name} is installed and cannot be imported: it"), jax.numpy_rank_promotion("allow"):
        return importlib.import_module(f"jaxpg.envs.suites.{prefix}")

"""A run that has been moved, copied or is named from another working directory: where the runs are that it needs.

A config names the runs that its own starts from, and the files that were made of them, by paths as they were typed when
it was trained. Those that lay within the run's own directory then are taken from within the one that it has now.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpg.files import flatten

PATHS = ("initial", "reward", "process_reward", "rewards", "pairs", "demonstrations", "step_labels")
"""The settings, and tables of settings, of a config that name runs and files of runs."""


def relocated(
    tables: Mapping[str, Any], before: Sequence[str], now: Path, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The tables of a config whose run lay in one of the directories `before`, and lies in `now`.

    A path beside that directory, as of the stages of one command, is one beside the new one where only that exists, or
    where `like`, the tables of the config that the run is to go on with, say so.
    """
    old = [Path(x) for x in before if Path(x).parts and not is_same(x, now)]
    wanted = {x for x in flatten(like or {}).values() if isinstance(x, str)}

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: moved(x) for name, x in value.items()}
        return _moved(value, old, now, wanted) if isinstance(value, str) else value

    return {name: moved(value) if old and name in PATHS else value for name, value in tables.items()}


def is_same(directory: str, now: Path) -> bool:
    """Whether a directory, as it was named once, is this one from here too: paths beside that name are right then."""
    return os.path.realpath(directory) == os.path.realpath(now)


def _moved(path: str, old: Sequence[Path], now: Path, wanted: Container[str]) -> str:
    for directory in old:
        inside, beside = directory, directory.parent
        if Path(path) != inside and Path(path).is_relative_to(inside):
            return str(now / Path(path).relative_to(inside))
        if beside.parts and Path(path) != beside and Path(path).is_relative_to(beside):
            candidate = now.parent / Path(path).relative_to(beside)
            if str(candidate) in wanted or (candidate.exists() and not Path(path).exists()):
                return str(candidate)
    return path

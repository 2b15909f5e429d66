"""Grids of settings, and which of their points one compiled program can train."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpg.errors import UserError
from jaxpg.experiments import config as configs

Point = dict[str, Any]
"""A value for each setting that is swept."""
SPACINGS: dict[str, Callable[..., np.ndarray]] = {"log": np.geomspace, "linear": np.linspace}


class CompiledGroup(NamedTuple):
    """Points that differ in traced numbers alone, so that one compiled program trains them all.

    config: the resolved config of the first of them.
    traced: names of the settings in which they differ.
    places: where each stands in the whole grid.
    points: the points.
    """

    config: configs.Config
    traced: tuple[str, ...]
    places: list[int]
    points: list[Point]


def parse_grid(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """`["learning_rate=1e-4:1e-2:log:8", "clip=0.1,0.2"]` as the values of each setting.

    `low:high:log:n` are n values with equal ratios, `low:high:linear:n` with equal distances, ends included, to three
    digits; anything else is a list of values.

    Raises:
        UserError: an assignment has no value, or a range is none.
    """
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if not name.strip() or not text.strip():
            raise UserError(
                f"--grid takes name=value,value or name=low:high:log:n, such as clip=0.1,0.2, not {assignment!r}."
            )
        values = _range(name, text) if text.count(":") == 3 else _list(text)
        grid[name.strip()] = [x for i, x in enumerate(values) if x not in values[:i]]
    return grid


def plan_grid(
    task: str | Path, algorithm: str, overrides: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> list[CompiledGroup]:
    """The programs that train a grid, every point checked; the last setting of the grid varies fastest.

    A number of the algorithm that only enters formulas is traced. Integers, words and whatever belongs to the
    network or the environment fix shapes or code, and take a program for each value.

    Raises:
        UserError: as `config.resolve`, for any of the points.
    """
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    resolved = [configs.resolve_config(task, algorithm, {**overrides, **point}) for point in points]
    traced = tuple(n for n in grid if all(type(config.settings.get(n)) is float for config in resolved))
    programs: dict[str, CompiledGroup] = {}
    for place, (point, config) in enumerate(zip(points, resolved, strict=True)):
        point = {name: config.settings[name] if name in traced else value for name, value in point.items()}
        own = repr([value for name, value in point.items() if name not in traced])
        program = programs.setdefault(own, CompiledGroup(config, traced, [], []))
        program.places.append(place)
        program.points.append(point)
    return list(programs.values())


def _range(name: str, text: str) -> list[float]:
    low, high, space, count = text.split(":")
    try:
        ends, number = (float(low), float(high)), int(count)
    except ValueError:
        ends, number = (np.nan, np.nan), 0
    if space not in SPACINGS or not np.isfinite(ends).all() or number < 2 or (space == "log" and min(ends) <= 0):
        raise UserError(
            f"A range is low:high:log:n or low:high:linear:n with n at least 2, above 0 for log; not {name}={text}."
        )
    return [float(f"{x:.3g}") for x in SPACINGS[space](*ends, number)]


def _list(text: str) -> list[Any]:
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:  # words without quotation marks
        return [part.strip() for part in text.split(",")]

"""Grids of settings: their points, grouped by the compiled program that can train them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpg.errors import UserError, excerpt
from jaxpg.experiments.config import Config, resolve_configs
from jaxpg.experiments.config_file import parse_value
from jaxpg.experiments.stages import names_run

Point = dict[str, Any]
"""A value for each setting that is swept."""
MOST_POINTS = 10_000
"""A larger number of points is taken for a typing mistake."""
MOST_PROGRAMS = 128
"""Programs of a grid at most: each is compiled for seconds, and all are checked beforehand."""
FIXED = (
    "task", "environment", "algorithm", "seeds", "total_steps", "threshold", "evaluations",
    "evaluation_greedy", "evaluation_episodes", "evaluation_samples",
)  # fmt: skip
"""What all points of a grid share, apart from the runs that they start from: what makes their scores comparable."""
SPACINGS: dict[str, Callable[..., np.ndarray]] = {"log": np.geomspace, "linear": np.linspace}


class CompiledGroup(NamedTuple):
    """Points that differ in traced numbers alone, so that one compiled program trains them all.

    config: the resolved config of the first point.
    traced: names of the settings in which the points differ.
    places: the index of each point in the whole grid.
    points: the points.
    """

    config: Config
    traced: tuple[str, ...]
    places: list[int]
    points: list[Point]


def parse_grid(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """`["learning_rate=1e-4:1e-2:log:8", "clip=0.1,0.2"]` as the values of each setting.

    `low:high:log:n` are n values with equal ratios, `low:high:linear:n` with equal distances, to six digits between
    exact ends; anything else is a list of values.

    Raises:
        UserError: an assignment has no value, a range is invalid, a setting is given twice or cannot be swept, or there
            are too many points.
    """
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, _, text = (part.strip() for part in assignment.partition("="))
        if not name or not text:
            raise UserError(
                "--grid takes name=value,value or name=low:high:log:n, such as clip=0.1,0.2, not "
                f"{excerpt(assignment)}."
            )
        if name in grid:
            raise UserError(f"--grid has {name} twice: give all of its values at once, as {name}=value,value.")
        if name in FIXED or names_run(name):
            raise UserError(f"--grid cannot have {name}, which is the same in all points.")
        if name.split(".")[0] == "rewards":
            raise UserError(
                f"--grid cannot have {name}: a score is the reward that is trained on, so the scores of two lists of "
                "rewards cannot be compared. Train each with jaxpg train and compare their evaluation_accuracy."
            )
        is_range = text.count(":") == 3 and "," not in text  # "module:function,..." is a list
        values = _parse_range(name, text) if is_range else _parse_list(text)
        grid[name] = [x for i, x in enumerate(values) if x not in values[:i]]
    number = math.prod(len(values) for values in grid.values())
    if not 1 <= number <= MOST_POINTS:
        raise UserError(f"A grid has from one to {MOST_POINTS:,} points, and this one has {number:,}.")
    return grid


def plan_grid(
    task: str | Path, algorithm: str, overrides: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> list[CompiledGroup]:
    """The points of a grid, every one checked, by the program that trains them; the last setting varies fastest.

    A number of the algorithm that only enters formulas is traced. Integers, words and all settings of the network or
    the environment fix shapes or code, and take a program for each value.

    Raises:
        UserError: as `resolve_config`, for any of the points; there are too many programs.
    """
    for name in overrides:
        refuse_twice(name, grid)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    resolved = resolve_configs(task, algorithm, [{**overrides, **point} for point in points])
    traced = tuple(n for n in grid if all(type(config.settings.get(n)) is float for config in resolved))
    groups: dict[str, CompiledGroup] = {}
    for place, (point, config) in enumerate(zip(points, resolved, strict=True)):
        point = {name: config.settings[name] if name in traced else value for name, value in point.items()}
        static = repr([value for name, value in point.items() if name not in traced])
        group = groups.setdefault(static, CompiledGroup(config, traced, [], []))
        group.places.append(place)
        group.points.append(point)
    if len(groups) > MOST_PROGRAMS:
        untraced = " and ".join(name for name in grid if name not in traced)
        raise UserError(
            f"A grid takes at most {MOST_PROGRAMS} programs, and this one {len(groups):,}: one for each value of "
            f"{untraced}. Give fewer of them; numbers of the algorithm such as learning_rate share a program."
        )
    return list(groups.values())


def refuse_twice(name: str, grid: Mapping[str, Any]) -> None:
    """Raise a UserError for a setting that has one value, and is in the grid."""
    if name in grid:
        raise UserError(f"{name} is in --grid and is also set to one value: remove one of them.")


def config_at(groups: Sequence[CompiledGroup], point: Mapping[str, Any]) -> Config:
    """The config of one point of a grid."""
    group = next(group for group in groups if point in group.points)
    checked = group.points[group.points.index(dict(point))]
    traced = {name: checked[name] for name in group.traced}
    return dataclasses.replace(group.config, settings=group.config.settings | traced)


def _parse_range(name: str, text: str) -> list[float]:
    low, high, spacing, count = text.split(":")
    try:
        ends, number = (float(low), float(high)), int(count)
    except ValueError:
        ends, number = (np.nan, np.nan), 0
    unbounded = not np.isfinite(ends).all() or (spacing == "log" and min(ends) <= 0)
    if spacing not in SPACINGS or unbounded or not 2 <= number <= MOST_POINTS:
        raise UserError(
            f"A range is low:high:log:n or low:high:linear:n with n from 2 to {MOST_POINTS:,}, above 0 for log; not "
            f"{excerpt(f'{name}={text}')}."
        )
    between = [float(f"{x:.6g}") for x in SPACINGS[spacing](*ends, number)[1:-1]]
    return [ends[0], *between, ends[1]]


def _parse_list(text: str) -> list[Any]:
    words = [part.strip() for part in text.split(",")]  # may stand without quotation marks, also beside numbers
    return parse_value(f"[{text}]", otherwise=[parse_value(word, otherwise=word) for word in words])

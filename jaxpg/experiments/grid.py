"""Grids of settings: their points, grouped by the compiled program that can train them."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpg.errors import UserError
from jaxpg.experiments.config import Config, resolve_config

Point = dict[str, Any]
"""A value for each setting that is swept."""
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

    `low:high:log:n` are n values with equal ratios, `low:high:linear:n` with equal distances, ends included, to three
    digits; anything else is a list of values.

    Raises:
        UserError: an assignment has no value, or a range is invalid.
    """
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if not name.strip() or not text.strip():
            raise UserError(
                f"--grid takes name=value,value or name=low:high:log:n, such as clip=0.1,0.2, not {assignment!r}."
            )
        values = _parse_range(name, text) if text.count(":") == 3 else _parse_list(text)
        grid[name.strip()] = [x for i, x in enumerate(values) if x not in values[:i]]
    return grid


def plan_grid(
    task: str | Path, algorithm: str, overrides: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> list[CompiledGroup]:
    """The points of a grid, every one checked, by the program that trains them; the last setting varies fastest.

    A number of the algorithm that only enters formulas is traced. Integers, words and all settings of the network or
    the environment fix shapes or code, and take a program for each value.

    Raises:
        UserError: as `resolve_config`, for any of the points.
    """
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    resolved = [resolve_config(task, algorithm, {**overrides, **point}) for point in points]
    traced = tuple(n for n in grid if all(type(config.settings.get(n)) is float for config in resolved))
    groups: dict[str, CompiledGroup] = {}
    for place, (point, config) in enumerate(zip(points, resolved, strict=True)):
        point = {name: config.settings[name] if name in traced else value for name, value in point.items()}
        static = repr([value for name, value in point.items() if name not in traced])
        group = groups.setdefault(static, CompiledGroup(config, traced, [], []))
        group.places.append(place)
        group.points.append(point)
    return list(groups.values())


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
    if spacing not in SPACINGS or not np.isfinite(ends).all() or number < 2 or (spacing == "log" and min(ends) <= 0):
        raise UserError(
            f"A range is low:high:log:n or low:high:linear:n with n at least 2, above 0 for log; not {name}={text}."
        )
    return [float(f"{x:.3g}") for x in SPACINGS[spacing](*ends, number)]


def _parse_list(text: str) -> list[Any]:
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:  # words without quotation marks
        return [part.strip() for part in text.split(",")]

"""Values and policies on a grid: a colour and a number per cell, an arrow per action of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.table import Table

from jaxpg.envs.mdps import Grid
from jaxpg.report.drawing import STYLE, literal, save

ARROWS = {(0, -1): "←", (1, 0): "↓", (0, 1): "→", (-1, 0): "↑"}
"""The sign of a move, (down, right)."""
WALL, END = "#8b949e", "#24292f"
NUMBERED = 12  # the most rows and columns whose cells have numbers and arrows
MAP_SIZE, PAGE_WIDTH = (2.4, 3.2), 13.5  # inches: a map's least width, which titles need, and its size without numbers


class ValueMap(NamedTuple):
    """Values and a policy, for a picture.

    values: [S].
    policy: [S, A], an arrow for every action that it takes.
    """

    values: np.ndarray
    policy: np.ndarray


def value_figure(maps: Mapping[str, ValueMap], grid: Grid, path: str | Path, *, title: str) -> None:
    """Draw maps side by side, on one scale of colours with white at zero, into a file (PNG, SVG or PDF).

    Args:
        maps: by title, which may have more than one line.
        grid: how the states lie.
        path: the file to write.
        title: of the figure.
    """
    cell = _cell_size(grid)
    width, height = max(MAP_SIZE[0], cell * grid.columns), cell * grid.rows + 0.55
    rows = ceil(len(maps) / max(1, int(PAGE_WIDTH / width)))
    columns = ceil(len(maps) / rows)
    norm = CenteredNorm(0.0, max(float(np.abs(m.values).max(initial=0.0)) for m in maps.values()) or 1.0)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(columns * width, rows * height + 0.4), layout="constrained")
        every = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (name, value_map) in zip(every, maps.items(), strict=False):
            _draw(axes, value_map, grid, norm)
            axes.set_title(literal(name, keep="\n"), fontsize=9)
        for axes in every:
            axes.set_axis_off()
        figure.suptitle(literal(title), fontsize=11)
    save(figure, path)


def _cell_size(grid: Grid) -> float:
    """The side of a cell in inches: of a large grid, whose cells have no numbers, the map has a given size."""
    side = max(grid.rows, grid.columns)
    return max(0.55, MAP_SIZE[0] / side) if side <= NUMBERED else MAP_SIZE[1] / side


def _draw(axes: Axes, value_map: ValueMap, grid: Grid, norm: CenteredNorm) -> None:
    for state, value in enumerate(value_map.values):
        row, column = divmod(state, grid.columns)
        label = grid.labels.get((row, column))
        shade = colormaps["RdBu"](norm(value)) if label is None else WALL if label == "" else END
        axes.add_patch(Rectangle((column, -row), 0.96, 0.96, facecolor=shade, edgecolor="none"))
        center, ink = (column + 0.48, -row + 0.48), "#10151b" if abs(float(norm(value)) - 0.5) < 0.3 else "white"
        if label is not None:
            size = min(7.5, 27 * _cell_size(grid))
            axes.text(*center, label, ha="center", va="center", fontsize=size, color="white")
        elif max(grid.rows, grid.columns) <= NUMBERED:
            for probability, (down, right) in zip(value_map.policy[state], grid.moves, strict=True):
                if probability > 0.01:
                    _arrow(axes, center, down, right, ink)
            number = f"{value:.2f}".replace("-", "−")
            axes.text(center[0], -row + 0.08, number, ha="center", va="bottom", fontsize=6.5, color=ink)
    axes.set(xlim=(-0.1, grid.columns + 0.06), ylim=(-grid.rows + 0.9, 1.06), aspect="equal")


def _arrow(axes: Axes, center: tuple[float, float], down: int, right: int, ink: str) -> None:
    x, y = center[0], center[1] + 0.12
    tip, tail = (x + 0.22 * right, y - 0.22 * down), (x - 0.12 * right, y + 0.12 * down)
    axes.annotate("", tip, tail, arrowprops={"arrowstyle": "-|>", "color": ink, "lw": 1.0, "shrinkA": 0, "shrinkB": 0})


def value_table(value_map: ValueMap, grid: Grid, *, title: str, width: float = inf) -> Table:
    """The map as a table for the terminal: value and arrow per cell.

    Args:
        value_map: what is shown.
        grid: how the states lie.
        title: of the table.
        width: of the terminal in letters. Where values with two digits do not fit, cells are set closer, then digits
            are left out, and at last the values.
    """
    for digits, padding in ((2, 1), (2, 0), (1, 0), (0, 0)):
        cells = [[_text(value_map, grid, row, column, digits) for column in range(grid.columns)]
                 for row in range(grid.rows)]  # fmt: skip
        widest = max(len(line) for row in cells for cell in row for line in cell.split("\n"))
        if grid.columns * (widest + 2 * padding + 1) + 1 <= width:
            return _lined(cells, title, padding)
    return _arrows_alone(value_map, grid, title, " " if 2 * grid.columns <= width else "")


def _lined(cells: Sequence[Sequence[str]], title: str, padding: int) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, show_lines=True, padding=(0, padding))
    for _ in cells[0]:
        table.add_column(justify="center", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table


def _arrows_alone(value_map: ValueMap, grid: Grid, title: str, between: str) -> Table:
    """A letter per cell: the first of its label, or the first of its arrows."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.caption, table.caption_justify = "The terminal is too narrow for the values.", "left"
    table.add_column(no_wrap=True)
    for row in range(grid.rows):
        cells = (_text(value_map, grid, row, column, 0).split("\n") for column in range(grid.columns))
        table.add_row(between.join(lines[-1][0] for lines in cells))
    return table


def _text(value_map: ValueMap, grid: Grid, row: int, column: int, digits: int) -> str:
    """The label of a cell, or its value with this many digits behind the point and its arrows in the next line."""
    state = row * grid.columns + column
    if (row, column) in grid.labels:
        return grid.labels[row, column] or "###"
    taken: Sequence[tuple[int, int]] = [
        move for p, move in zip(value_map.policy[state], grid.moves, strict=True) if p > 0.01
    ]
    return f"{value_map.values[state]:.{digits}f}\n{''.join(ARROWS[move] for move in taken)}"

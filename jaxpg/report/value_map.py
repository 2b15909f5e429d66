"""Values and policies on a grid: a colour and a number per cell, an arrow per action of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
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
    rows = ceil(len(maps) / max(1, 24 // grid.columns))
    columns = ceil(len(maps) / rows)
    width = max(2.4, 0.55 * grid.columns)
    norm = CenteredNorm(0.0, max(float(np.abs(m.values).max(initial=0.0)) for m in maps.values()) or 1.0)
    with matplotlib.rc_context(STYLE):
        size = (columns * width, rows * (width * grid.rows / grid.columns + 0.55) + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        every = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (name, value_map) in zip(every, maps.items(), strict=False):
            _draw(axes, value_map, grid, norm)
            axes.set_title(literal(name, keep="\n"), fontsize=9)
        for axes in every:
            axes.set_axis_off()
        figure.suptitle(literal(title), fontsize=11)
    save(figure, path)


def _draw(axes: Axes, value_map: ValueMap, grid: Grid, norm: CenteredNorm) -> None:
    for state, value in enumerate(value_map.values):
        row, column = divmod(state, grid.columns)
        label = grid.labels.get((row, column))
        shade = colormaps["RdBu"](norm(value)) if label is None else WALL if label == "" else END
        axes.add_patch(Rectangle((column, -row), 0.96, 0.96, facecolor=shade, edgecolor="none"))
        center, ink = (column + 0.48, -row + 0.48), "#10151b" if abs(float(norm(value)) - 0.5) < 0.3 else "white"
        if label is not None:
            axes.text(*center, label, ha="center", va="center", fontsize=7.5, color="white")
        elif grid.columns <= 12:
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


def value_table(value_map: ValueMap, grid: Grid, *, title: str) -> Table:
    """The map as a table for the terminal: value and arrow per cell."""
    table = Table(title=title, title_justify="left", show_header=False, show_lines=True)
    for _ in range(grid.columns):
        table.add_column(justify="center", no_wrap=True)
    for row in range(grid.rows):
        table.add_row(*(_text(value_map, grid, row, column) for column in range(grid.columns)))
    return table


def _text(value_map: ValueMap, grid: Grid, row: int, column: int) -> str:
    state = row * grid.columns + column
    if (row, column) in grid.labels:
        return grid.labels[row, column] or "###"
    taken: Sequence[tuple[int, int]] = [
        move for p, move in zip(value_map.policy[state], grid.moves, strict=True) if p > 0.01
    ]
    return f"{value_map.values[state]:.2f}\n{''.join(ARROWS[move] for move in taken)}"

"""Results of a sweep: a table, and a figure of the score over the settings with its intervals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich import box
from rich.table import Table
from rich.text import Text

from jaxpg.errors import UserError
from jaxpg.files import replace_file, setting_text
from jaxpg.report.comparison import format_estimate, format_number, to_jsonable
from jaxpg.report.drawing import STYLE, literal, save, scale_scores
from jaxpg.report.palette import BLUE, VERMILION
from jaxpg.report.statistics import Estimate, bootstrap, interquartile_mean
from jaxpg.user_input.printable import printable

MAX_ROWS = 20  # of a table
Grid = Mapping[str, Sequence[Any]]
"""The values of each setting; points are ordered with the last setting varying fastest."""


def write_sweep(
    grid: Grid, scores: np.ndarray, directory: Path, *, title: str, details: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `sweep.json` and `sweep.png` into a directory.

    Args:
        grid: the settings.
        scores: [P, S], the final return of each point and seed, NaN where a run diverged.
        directory: where to write.
        title: what was trained.
        details: how the numbers were made.

    Returns:
        The best point: the largest interquartile mean among those of which no run diverged, then the largest mean.

    Raises:
        UserError: runs of every point diverged.
    """
    estimate = bootstrap(scores)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    records = [
        {"settings": point, "final": final, "iqm": _at(estimate, place)}
        for place, (point, final) in enumerate(zip(points, scores, strict=True))
    ]
    text = json.dumps(to_jsonable({"title": title, "grid": grid, "points": records, "details": details}), indent=1)
    replace_file(directory / "sweep.json", text + "\n")
    if np.isnan(estimate.value).all():
        raise UserError(f"Runs of every point diverged ({directory / 'sweep.json'}): try smaller step sizes.")
    sweep_figure(grid, scores, directory / "sweep.png", title=title)
    return points[ranked(scores)[0]]


def sweep_table(grid: Grid, scores: np.ndarray, *, title: str) -> Table:
    """The best points of a grid, a line each.

    Args:
        grid: the settings.
        scores: [P, S], the final return of each point and seed, NaN where a run diverged.
        title: what was trained.
    """
    table = Table(title=Text(printable(title), "italic"), title_justify="left", box=box.SIMPLE_HEAD)
    for name in (*grid, "IQM [95%]", "mean", "diverged"):
        table.add_column(_cell(name), overflow="fold")  # of a name no letter is lost, and of a number no digit
    estimate, points = bootstrap(scores), list(itertools.product(*grid.values()))
    for place in ranked(scores)[:MAX_ROWS]:
        diverged = int(np.isnan(scores[place]).sum())
        mean = format_number(float(scores[place].mean()))
        row = [
            *map(format_setting, points[place]),
            format_estimate(_at(estimate, place)),
            mean,
            str(diverged or ""),
        ]
        table.add_row(*map(_cell, row))
    if len(points) > MAX_ROWS:
        table.caption = f"the best {MAX_ROWS} of {len(points)}"
    return table


def beyond_the_grid(grid: Grid, point: Mapping[str, Any]) -> str:
    """A sentence that names the settings whose smallest or largest value a point has; "" where there are none.

    Only settings with three numbers or more are looked at: of two each is an end.
    """
    numbers = {name: xs for name, xs in grid.items() if len(xs) > 2 and all(map(_is_number, xs))}
    ends = {name: "smallest" for name, xs in numbers.items() if point[name] == min(xs)}
    ends |= {name: "largest" for name, xs in numbers.items() if point[name] == max(xs)}
    if not ends:
        return ""
    named = " and ".join(f"its {name} is the {end} of the grid" for name, end in ends.items())
    return f"{named[0].upper()}{named[1:]}: a better point may lie beyond."


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _cell(text: str) -> Text:
    return Text(printable(text))


def ranked(scores: np.ndarray) -> list[int]:
    """Places of the grid, best first: by interquartile mean, then by mean; those of which a run diverged last.

    Where the return is bounded, many points have the same interquartile mean, the maximum; the mean breaks the tie.
    """
    iqm = np.where(np.isfinite(scores).all(1), interquartile_mean(scores), np.nan)
    keys = np.nan_to_num(np.stack([scores.mean(1), iqm]), nan=-np.inf)
    return np.lexsort(-keys).tolist()


def sweep_figure(grid: Grid, scores: np.ndarray, path: str | Path, *, title: str) -> None:
    """Draw the interquartile mean over seeds at every point, with its 95% interval, into a file (PNG, SVG or PDF).

    One setting gives a curve, or points where its values are no numbers. Two give a heat map, with the one that has
    more values from left to right; each combination of further settings has its own map.

    Args:
        grid: the settings.
        scores: [P, S], as in `sweep_table`.
        path: the file to write.
        title: what was trained.
    """
    estimate = bootstrap(scores)
    shape = [len(values) for values in grid.values()]
    places = np.arange(len(scores)).reshape(shape)
    with matplotlib.rc_context(STYLE):
        if len([n for n in shape if n > 1]) < 2:
            figure = _curve(grid, estimate, title)
        else:
            figure = _maps(grid, estimate, places, ranked(scores)[0], title)
    save(figure, path)


_CHARACTERS_ACROSS = 90  # of labels below a curve side by side


def _curve(grid: Grid, estimate: Estimate, title: str) -> Figure:
    name = max(grid, key=lambda n: len(grid[n]))
    values = grid[name]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(literal(title), loc="left", fontweight="bold", fontsize=12)
    numeric = len(values) > 1 and all(type(x) in (int, float) for x in values)
    x = np.asarray(values, float) if numeric else np.arange(len(values))
    if not numeric:
        axes.set_xticks(x, [literal(format_setting(value)) for value in values])
        if sum(len(format_setting(value)) + 3 for value in values) > _CHARACTERS_ACROSS:
            axes.tick_params(axis="x", rotation=90)
        axes.set_xlim(-0.5, len(values) - 0.5)
    elif min(x) > 0 and max(x) / min(x) >= 20:
        axes.set_xscale("log")
        margin = (max(x) / min(x)) ** 0.05
        axes.set_xlim(min(x) / margin, max(x) * margin)
    else:
        margin = 0.05 * (max(x) - min(x))
        axes.set_xlim(min(x) - margin, max(x) + margin)
    some = bool(np.isfinite(estimate.low).any())  # of few seeds there are no intervals
    spread = np.nan_to_num([estimate.value - estimate.low, estimate.high - estimate.value])
    spread = np.maximum(spread, 0.0)  # an end of the interval may be the value but for rounding
    order = np.argsort(x, kind="stable")  # the line goes from left to right, whatever the order of the grid
    axes.errorbar(
        x[order],
        estimate.value[order],
        yerr=spread[:, order] if some else None,
        fmt="o-" if numeric else "o",  # between names there is nothing
        color=BLUE,
        capsize=3,
        linewidth=1.4,
    )
    if (diverged := ~np.isfinite(estimate.value)).any():
        at_the_bottom = axes.get_xaxis_transform()
        axes.plot(x[diverged], np.full(diverged.sum(), 0.03), "x", color=VERMILION, transform=at_the_bottom)
        axes.set_title("× a run diverged", loc="right", color=VERMILION, fontsize=9)
    axes.set_xlabel(literal(name))
    axes.set_ylabel("final return, IQM and 95% interval" if some else "final return, IQM")
    axes.set_ylim(scale_scores(axes.yaxis, axes.get_ylim()))
    axes.grid(axis="y")
    return figure


_CELL = 0.82, 0.55  # inches
_INCHES_PER_CHARACTER = 0.12  # of a bold heading of 12 points
_INCHES_PER_LETTER = 0.085  # of the value of a setting


def _maps(grid: Grid, estimate: Estimate, places: np.ndarray, best: int, title: str) -> Figure:
    """Heat maps of the two settings with the most values, one for each combination of the others."""
    names = list(grid)
    order = sorted(range(len(names)), key=lambda i: len(grid[names[i]]))
    *others, down, across = order
    places = places.transpose(*others, down, across)
    combinations = list(itertools.product(*(grid[names[i]] for i in others)))
    maps = places.reshape(len(combinations), *places.shape[-2:])
    rows, columns = maps.shape[1:]
    maps_per_row = min(len(maps), 3)
    map_rows = -(-len(maps) // maps_per_row)
    some = np.isfinite(estimate.low).any()
    lines = [title, "final return, IQM [95% interval]" if some else "final return, IQM"]
    needed = 0.3 + _INCHES_PER_CHARACTER * max(map(len, lines))
    width = max(needed, 1.2 + maps_per_row * (0.9 + _CELL[0] * columns))
    below = [literal(format_setting(x)) for x in grid[names[across]]]
    longest = _INCHES_PER_LETTER * max(map(len, below))
    upright = longest if longest > 0.9 * _CELL[0] else 0.0  # else side by side
    figure = Figure(figsize=(width, 1.3 + map_rows * (1.0 + _CELL[1] * rows + upright)), layout="constrained")
    figure.suptitle("\n".join(map(literal, lines)), x=0.01, ha="left", fontweight="bold", fontsize=12)
    known = estimate.value[np.isfinite(estimate.value)]
    scale = Normalize(known.min(initial=np.inf), known.max(initial=-np.inf)) if known.size else Normalize(0, 1)
    all_axes = figure.subplots(map_rows, maps_per_row, squeeze=False).flat
    for axes, combination, map_ in itertools.zip_longest(all_axes, combinations, maps):
        if map_ is None:
            axes.set_axis_off()
            continue
        subtitle = ", ".join(f"{names[i]} {format_setting(x)}" for i, x in zip(others, combination, strict=True))
        axes.set_title(literal(subtitle), fontsize=9)
        _map(axes, estimate, map_, best, scale)
        axes.set_xticks(range(columns), below, rotation=90 if upright else 0)
        axes.set_yticks(range(rows), [literal(format_setting(x)) for x in grid[names[down]]])
        axes.set_xlabel(literal(names[across]))
        axes.set_ylabel(literal(names[down]))
    return figure


def _map(axes: Axes, estimate: Estimate, places: np.ndarray, best: int, scale: Normalize) -> None:
    """One heat map: the value of every cell with its interval below; the best cell has a frame."""
    colors = colormaps["cividis"].with_extremes(bad="#d0d0d0")
    values = estimate.value[places]
    axes.imshow(np.ma.masked_invalid(values), cmap=colors, norm=scale, aspect="auto")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for (row, column), place in np.ndenumerate(places):
        value = values[row, column]
        ink = "white" if np.isfinite(value) and scale(value) < 0.55 else "black"
        _, _, bounds = format_estimate(_at(estimate, place)).partition(" ")
        above = 0.1 if np.isfinite(value) and bounds else 0.0
        shown = format_number(float(value)) if np.isfinite(value) else "diverged"
        axes.text(column, row - above, shown, ha="center", va="center", color=ink, fontsize=9)
        axes.text(column, row + 0.24, bounds, ha="center", va="center", color=ink, fontsize=6)
        if place == best:
            frame = Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, fill=False, ec=VERMILION, lw=2)
            axes.add_patch(frame)


def _at(estimate: Estimate, place: int) -> Estimate:
    return Estimate(*(x[place] for x in estimate))


def format_setting(value: Any) -> str:
    """A value of a setting, numbers in few digits."""
    return f"{value:g}" if isinstance(value, float) else setting_text(value)

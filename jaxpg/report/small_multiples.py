"""Small multiples: a panel for each line, before others in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpg.report.drawing import add_title, broken, draw_line, draw_named, draw_threshold, marker_of
from jaxpg.report.palette import LineStyle, color_of
from jaxpg.report.statistics import Estimate, Floats, middles

COLUMNS = 4
GREY = LineStyle("#8b949e", "-")  # readable on white and on black


def panels(
    edges: Floats,
    lines: Mapping[str, Estimate],
    behind: Mapping[str, Sequence[str]],
    *,
    title: str,
    subtitle: str,
    threshold: float | None = None,
) -> tuple[Figure, list[Axes]]:
    """A panel for each name of `behind`, in its order, with its line before those that are behind it.

    Args:
        edges: of the bins of steps, as of `draw_line`.
        lines: by name.
        behind: name -> the names of the grey lines. A single one has its interval, and its name below the panel's.
        title: of the figure.
        subtitle: of the figure.
        threshold: score drawn as a dashed line.
    """
    columns = min(COLUMNS, len(behind))
    rows = -(-len(behind) // columns)
    figure = Figure(figsize=(7.6, 1.3 + 1.4 * rows), layout="constrained")
    add_title(figure, title, subtitle)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, others) in zip(grid, behind.items(), strict=False):
        _draw_panel(axes, edges, lines, name, others)
        if threshold is not None:
            draw_threshold(axes, threshold)
    for axes in grid[len(behind) :]:
        axes.remove()
    for axes in grid[max(len(behind) - columns, 0) : len(behind)]:
        axes.tick_params(labelbottom=True)  # also where there is no panel below
    return figure, list(grid[: len(behind)])


def _draw_panel(axes: Axes, edges: Floats, lines: Mapping[str, Estimate], name: str, others: Sequence[str]) -> None:
    heading = broken(name)
    if len(others) == 1:
        draw_line(axes, edges, lines[others[0]], GREY, shade=0.15, width=1.2)
        axes.annotate(f"grey: {broken(others[0])}", (0, 1), (0, 3), xycoords="axes fraction",
                      textcoords="offset points", fontsize=7, alpha=0.7)  # fmt: skip
    else:
        for other in others:
            values = lines[other].value
            axes.plot(middles(edges), values, marker=marker_of(values), color=GREY.color, alpha=0.4, linewidth=0.7)
    color = color_of(name)
    draw_named(axes, edges, name, lines[name], LineStyle(color, "-"))
    pad = 12 if len(others) == 1 else 3
    axes.set_title(heading, loc="left", fontsize=8, fontweight="bold", color=color, pad=pad)
    axes.tick_params(which="both", length=3, width=0.8, labelsize=8)

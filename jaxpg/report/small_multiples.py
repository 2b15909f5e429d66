"""The ladder as small multiples: a panel for each algorithm beside its parent, which is grey."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpg.report.figures import (
    DEFAULT_UNITS,
    STYLE,
    Curves,
    Units,
    draw_line,
    drawing_grid,
    literal,
    scale_steps,
)
from jaxpg.report.palette import LineStyle, color_of
from jaxpg.report.statistics import Estimate, Floats, binned, bootstrap

COLUMNS = 4
GREY = LineStyle("#8b949e", "-")  # readable on white and on black


def ladder_figure(curves: Curves, parents: Mapping[str, str], *, units: Units = DEFAULT_UNITS) -> Figure | None:
    """Every algorithm whose nearest ancestor is among the curves, each in a panel with it; None if there is none.

    Args:
        curves: algorithm -> (steps, returns), as for `learning_curve`.
        parents: algorithm -> its parent.
        units: of the axes.
    """
    pairs = [(name, ancestor) for name in curves if (ancestor := _ancestor(name, curves, parents))]
    if not pairs:
        return None
    edges, logarithmic = drawing_grid(curves)
    lines = {name: bootstrap(binned(steps, returns, edges)) for name, (steps, returns) in curves.items()}
    rows = -(-len(pairs) // COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 0.5 + 1.6 * rows), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True)
        for axes, (name, ancestor) in zip(panels.flat, pairs, strict=False):
            _draw_pair(axes, edges, lines, name, ancestor)
            scale_steps(axes, logarithmic=logarithmic, ticks=3)
            axes.set_xlim(edges[0], edges[-1])
        for axes in panels.flat[len(pairs) :]:
            axes.set_axis_off()
        figure.supxlabel(literal(units.steps), fontsize=8)
        figure.supylabel(literal(units.score), fontsize=8)
    return figure


def _ancestor(name: str, curves: Curves, parents: Mapping[str, str]) -> str | None:
    """The nearest ancestor of an algorithm that has a curve."""
    parent = parents.get(name)
    while parent is not None and parent not in curves:
        parent = parents.get(parent)
    return parent


def _draw_pair(axes: Axes, edges: Floats, lines: Mapping[str, Estimate], name: str, ancestor: str) -> None:
    draw_line(axes, edges, lines[ancestor], GREY, shade=0.15, width=1.2)
    draw_line(axes, edges, lines[name], LineStyle(color_of(name), "-"), shade=0.2, width=1.5)
    axes.set_title(literal(name), loc="left", fontsize=8, fontweight="bold", color=color_of(name), pad=12)
    axes.annotate(f"grey: {literal(ancestor)}", (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points",
                  fontsize=7, alpha=0.7)  # fmt: skip
    axes.tick_params(which="both", length=2, width=0.6, labelsize=7)
    axes.grid(axis="y")

"""Figures: learning curves with intervals over seeds, and the final performance of each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from jaxpg.errors import UserError
from jaxpg.report.drawing import (
    DEFAULT_UNITS,
    INK,
    STYLE,
    Units,
    broken,
    decorate,
    draw_named,
    draw_threshold,
    label_ends,
    literal,
    save,
    scale_scores,
    scale_steps,
)
from jaxpg.report.hover import show_on_hover
from jaxpg.report.palette import COLORS, color_of, line_styles
from jaxpg.report.small_multiples import panels
from jaxpg.report.statistics import MIN_SCORES, Estimate, Floats, binned, bootstrap, interquartile_mean

BINS = 100
Curves = Mapping[str, tuple[ArrayLike, ArrayLike]]


def step_grid(curves: Curves) -> Floats:
    """Edges of equal bins from zero to the steps of the longest run, `[BINS + 1]`."""
    return np.linspace(0.0, max(float(np.nanmax(steps, initial=0.0)) for steps, _ in curves.values()) or 1.0, BINS + 1)


def drawing_grid(curves: Curves) -> tuple[Floats, bool]:
    """`step_grid` for a figure, and whether it is logarithmic.

    It is where every curve has settled, within 5% of the range of all, in the first quarter of the steps: on a linear
    axis what happens would be a wall at its left end.
    """
    edges = step_grid(curves)
    means = [interquartile_mean(binned(steps, returns, edges)) for steps, returns in curves.values()]
    known = [mean for mean in means if np.isfinite(mean).any()]
    first = min((x for steps, _ in curves.values() for x in np.ravel(steps)[np.ravel(steps) > 0]), default=0.0)
    if not known or not 0 < first < edges[-1] / 20:
        return edges, False
    spread = np.nanmax(known) - np.nanmin(known)
    settled = max(_settles(mean, 0.05 * spread) for mean in known)
    if not spread or settled > BINS / 4:
        return edges, False
    return np.geomspace(max(first, edges[-1] / 1000), edges[-1], BINS + 1), True


def _settles(curve: Floats, tolerance: float) -> int:
    """The first place from which on a curve stays near its last value."""
    values = curve[np.isfinite(curve)]
    far = np.nonzero(np.abs(values - values[-1]) > tolerance)[0]
    return int(np.nonzero(np.isfinite(curve))[0][0] + (far[-1] + 1 if far.size else 0))


def learning_curve(
    curves: Curves,
    path: str | Path,
    *,
    title: str,
    threshold: float | None = None,
    units: Units = DEFAULT_UNITS,
) -> None:
    """Draw learning curves over steps into a file (PNG, SVG or PDF, by its suffix).

    Each line is the interquartile mean over seeds of the returns, averaged within a hundredth of the longest run; the
    shaded area is its 95% bootstrap interval, where there are seeds enough for one. A line covers the steps at which
    every seed has had a return. Steps are logarithmic where all of it happens at the beginning (`drawing_grid`). More
    curves than there are colours have a panel each, in their order.

    Args:
        curves: label -> (steps `[N]` or `[N, S]`, returns `[N, S]`, NaN where no episode ended).
        path: the file to write.
        title: the task.
        threshold: return drawn as a dashed line.
        units: of the axes.

    Raises:
        UserError: there is no curve, shapes do not match, or the suffix is none of FORMATS.
        OSError: the file cannot be written, as in a folder that is not there.
    """
    save(curves_figure(curves, title=title, threshold=threshold, units=units), path)


def curves_figure(
    curves: Curves, *, title: str, threshold: float | None = None, units: Units = DEFAULT_UNITS
) -> Figure:
    """The figure of `learning_curve`."""
    if not curves:
        raise UserError("There is no curve to draw: give at least one run.")
    if len(curves) > len(COLORS):
        behind = {name: [other for other in curves if other != name] for name in curves}
        return _panels_figure(curves, behind, title, "grey: the others", threshold, units)
    edges, logarithmic = drawing_grid(curves)
    lines = estimates(curves, edges)
    styles = line_styles(lines)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        decorate(axes, title, _subtitle(_seeds(curves)))
        axes.set_xlabel(literal(units.steps))
        axes.set_ylabel(literal(units.score))
        for name, line in lines.items():
            draw_named(axes, edges, name, line, styles[name])
        if threshold is not None:
            draw_threshold(axes, threshold)
            # below the line on the right, where curves that have reached the threshold are above the text
            place = (0.994, threshold), axes.get_yaxis_transform()
            axes.annotate(f"threshold {threshold:g}", place[0], (0, -4), xycoords=place[1], textcoords="offset points",
                          fontsize=8, alpha=0.7, ha="right", va="top")  # fmt: skip
        _scale([axes], edges, lines, units, logarithmic=logarithmic)
        label_ends(axes, lines, styles, units.score)
    return figure


def ladder_figure(
    curves: Curves, parents: Mapping[str, str], *, title: str, units: Units = DEFAULT_UNITS
) -> Figure | None:
    """Every algorithm whose nearest ancestor is among the curves, each in a panel with it; None if there is none.

    Args:
        curves: algorithm -> (steps, returns), as for `learning_curve`.
        parents: algorithm -> its parent.
        title: of the figure.
        units: of the axes.
    """
    behind = {name: [ancestor] for name in curves if (ancestor := _ancestor(name, curves, parents))}
    return _panels_figure(curves, behind, title, "grey: the parent", None, units) if behind else None


def _ancestor(name: str, curves: Curves, parents: Mapping[str, str]) -> str | None:
    """The nearest ancestor of an algorithm that has a curve."""
    parent = parents.get(name)
    while parent is not None and parent not in curves:
        parent = parents.get(parent)
    return parent


def _panels_figure(
    curves: Curves,
    behind: Mapping[str, Sequence[str]],
    title: str,
    note: str,
    threshold: float | None,
    units: Units,
) -> Figure:
    """A panel for each name of `behind`; see `panels`."""
    edges, logarithmic = drawing_grid(curves)
    lines = estimates(curves, edges)
    subtitle = f"{_subtitle(_seeds(curves))}; {note}" + (f"; dashed: {threshold:g}" if threshold is not None else "")
    with matplotlib.rc_context(STYLE):
        figure, drawn = panels(edges, lines, behind, title=title, subtitle=subtitle, threshold=threshold)
        _scale(drawn, edges, lines, units, logarithmic=logarithmic, ticks=3)
        figure.supxlabel(literal(units.steps), fontsize=9)
        figure.supylabel(literal(units.score), fontsize=9)
    return figure


def estimates(curves: Curves, edges: Floats) -> dict[str, Estimate]:
    """The interquartile mean of every curve in every bin, with its interval."""
    return {name: bootstrap(binned(steps, returns, edges)) for name, (steps, returns) in curves.items()}


def _scale(
    panels: Sequence[Axes],
    edges: Floats,
    lines: Mapping[str, Estimate],
    units: Units,
    *,
    logarithmic: bool,
    ticks: int = 6,
) -> None:
    """The axes that all panels share, as far as there are values in any, and a grid of scores."""
    known = np.isfinite([line.value for line in lines.values()]).any(axis=0)
    drawn = [axes.dataLim.intervaly for axes in panels]
    widened = scale_scores(panels[0].yaxis, panels[0].get_ylim())  # which all panels share
    limits = units.limits(widened, (np.min(drawn), np.max(drawn)))
    for axes in panels:
        axes.grid(axis="y")
        scale_steps(axes, logarithmic=logarithmic, ticks=ticks)
        axes.set_xlim(edges[0], edges[1:][known].max(initial=0.0) or edges[-1])
        axes.set_ylim(limits)


def finals_figure(
    finals: Mapping[str, tuple[ArrayLike, Estimate]],
    *,
    title: str,
    threshold: float | None = None,
    units: Units = DEFAULT_UNITS,
) -> Figure:
    """Every seed's final performance as a dot, with the interquartile mean and its interval over them.

    Args:
        finals: label -> (scores [S], their interquartile mean with interval).
        title: of the figure.
        threshold: score drawn as a dashed line.
        units: of the axes.
    """
    names = list(map(broken, finals))
    row = max(0.36, 0.18 * max(name.count("\n") + 1 for name in names))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.5 + row * len(names)), layout="constrained")
        axes = figure.add_subplot()
        decorate(axes, title, _subtitle([np.size(scores) for scores, _ in finals.values()]) + "; a dot for each seed")
        for index, (name, (scores, estimate)) in enumerate(finals.items()):
            color = color_of(name)
            # Dots are moved up and down alone, so that equal scores are seen as many and none leaves its value.
            places = index + 0.25 + 0.11 * np.sin(2.4 * np.arange(np.size(scores)))
            dots = axes.scatter(scores, places, s=26, color=color, alpha=0.5, linewidths=0)
            show_on_hover(dots, [f"{name}: {score:.4g}" for score in np.ravel(scores)])
            axes.plot([estimate.low, estimate.high], [index, index], color=color, linewidth=2.4)
            axes.plot(estimate.value, index, "o", color=color, markersize=7)
        if threshold is not None:
            axes.axvline(threshold, color=INK, alpha=0.55, linewidth=0.9, dashes=(4, 3), zorder=1)
        axes.set_yticks(range(len(finals)), names)
        axes.set_ylim(len(finals) - 0.4, -0.6)
        axes.set_xlim(units.limits(scale_scores(axes.xaxis, axes.get_xlim()), axes.dataLim.intervalx))
        axes.set_xlabel(literal(units.score))
        axes.grid(axis="x")
    return figure


def _seeds(curves: Curves) -> list[int]:
    return [np.shape(returns)[1] for _, returns in curves.values()]


def _subtitle(counts: Sequence[int]) -> str:
    """What the lines are, given the number of seeds of each."""
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "one seed"
    seeds = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    return f"interquartile mean over {seeds}" + (", 95% bootstrap interval" if most >= MIN_SCORES else "")

"""Figures: learning curves with intervals over seeds, and the final performance of each seed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from jaxpg.errors import UserError
from jaxpg.files import replace_file
from jaxpg.printable import printable
from jaxpg.report.hover import add_hover, number_dots, show_on_hover, with_titles
from jaxpg.report.palette import COLORS, LineStyle, color_of, line_styles
from jaxpg.report.statistics import MIN_SCORES, Estimate, Floats, binned, bootstrap, interquartile_mean

BINS = 100
FORMATS = (".png", ".svg", ".pdf")
INK = "#24292f"  # a colour that no other element has, see `inline_svg`
STYLE: dict[Any, Any] = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxpg",  # the same figure gives the same file
}
Curves = Mapping[str, tuple[ArrayLike, ArrayLike]]


class Units(NamedTuple):
    """What the axes of a learning curve are: the unit of the steps, the name of the score, and its possible bounds."""

    steps: str = "environment steps"
    score: str = "episode return"
    bounds: tuple[float, float] | None = None

    def limits(self, drawn: tuple[float, float], scores: tuple[float, float]) -> tuple[float, float]:
        """The limits of an axis of scores from `drawn`, no further than a line's width beyond the bounds.

        Where the least or the greatest of `scores` is beyond them, they are not the bounds.
        """
        low, high = self.bounds or (-np.inf, np.inf)
        if scores[0] < low or scores[1] > high:
            return drawn
        margin = 0.03 * (min(drawn[1], high) - max(drawn[0], low))
        return max(drawn[0], low - margin), min(drawn[1], high + margin)


DEFAULT_UNITS = Units()


def step_grid(curves: Curves, bins: int = BINS) -> Floats:
    """Edges of equal bins from zero to the steps of the longest run, `[bins + 1]`."""
    return np.linspace(0.0, max(float(np.nanmax(steps, initial=0.0)) for steps, _ in curves.values()) or 1.0, bins + 1)


def drawing_grid(curves: Curves, bins: int = BINS) -> tuple[Floats, bool]:
    """`step_grid` for a figure, and whether it is logarithmic.

    It is where every curve has settled, within 5% of the range of all, in the first quarter of the steps: on a linear
    axis what happens would be a wall at its left end.
    """
    edges = step_grid(curves, bins)
    means = [interquartile_mean(binned(steps, returns, edges)) for steps, returns in curves.values()]
    known = [mean for mean in means if np.isfinite(mean).any()]
    first = min((x for steps, _ in curves.values() for x in np.ravel(steps)[np.ravel(steps) > 0]), default=0.0)
    if not known or not 0 < first < edges[-1] / 20:
        return edges, False
    spread = np.nanmax(known) - np.nanmin(known)
    settled = max(_settles(mean, 0.05 * spread) for mean in known)
    if not spread or settled > bins / 4:
        return edges, False
    return np.geomspace(max(first, edges[-1] / 1000), edges[-1], bins + 1), True


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
    every seed has a return. Steps are logarithmic where all of it happens at the beginning (`drawing_grid`).

    Args:
        curves: label -> (steps `[N]` or `[N, S]`, returns `[N, S]`, NaN where no episode ended).
        path: the file to write.
        title: the task.
        threshold: return drawn as a dashed line.
        units: of the axes.

    Raises:
        UserError: there is no curve, shapes do not match, or the suffix is none of FORMATS.
    """
    save(curves_figure(curves, title=title, threshold=threshold, units=units), path)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file, completely or not at all.

    Raises:
        UserError: its suffix is none of FORMATS.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise UserError(f"The file of a figure must end in {', '.join(FORMATS)}, not {path}.")
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=path.suffix[1:], dpi=200, facecolor="white")
    replace_file(path, buffer.getvalue())


def inline_svg(figure: Figure) -> str:
    """A figure as an `<svg>` element without background, its INK replaced by the text colour of the page.

    Values are shown where a mouse rests on dots (`hover`).
    """
    texts, buffer = number_dots(figure), io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return with_titles(svg[svg.index("<svg") :].replace(INK, "currentColor"), texts)


def literal(text: str) -> str:
    """Text for matplotlib that is drawn as it is: between two dollar signs matplotlib would read a formula."""
    return printable(text).replace("$", r"\$")


def curves_figure(
    curves: Curves, *, title: str, threshold: float | None = None, units: Units = DEFAULT_UNITS
) -> Figure:
    """The figure of `learning_curve`."""
    if not curves:
        raise UserError("There is no curve to draw: give at least one run.")
    edges, logarithmic = drawing_grid(curves)
    lines = {name: bootstrap(binned(steps, returns, edges)) for name, (steps, returns) in curves.items()}
    styles = line_styles(lines)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        _decorate(axes, title, _subtitle([np.shape(returns)[1] for _, returns in curves.values()]))
        axes.set_xlabel(literal(units.steps))
        axes.set_ylabel(literal(units.score))
        axes.grid(axis="y")
        for name, line in lines.items():
            draw_line(axes, edges, line, styles[name], shade=0.17 if len(lines) <= len(COLORS) else 0.07)
            add_hover(axes, middles(edges)[:: len(edges) // 25], line.value[:: len(edges) // 25], name)
        scale_steps(axes, logarithmic=logarithmic)
        known = np.isfinite([line.value for line in lines.values()]).any(axis=0)
        axes.set_xlim(edges[0], edges[1:][known].max(initial=0.0) or edges[-1])
        if threshold is not None:
            axes.axhline(threshold, color=INK, alpha=0.55, linewidth=0.9, dashes=(4, 3), zorder=1)
            # below the line on the right, where curves that have reached the threshold are above the text
            place = (0.994, threshold), axes.get_yaxis_transform()
            axes.annotate(f"threshold {threshold:g}", place[0], (0, -4), xycoords=place[1], textcoords="offset points",
                          fontsize=8, alpha=0.7, ha="right", va="top")  # fmt: skip
        axes.set_ylim(units.limits(axes.get_ylim(), axes.dataLim.intervaly))
        _label_ends(axes, lines, styles)
    return figure


def scale_steps(axes: Axes, *, logarithmic: bool, ticks: int = 6) -> None:
    """The axis of steps, with prefixes: 10 k, 1 M."""
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(ticks))
    axes.xaxis.set_major_formatter(EngFormatter(sep="\N{THIN SPACE}"))


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
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.5 + 0.36 * len(finals)), layout="constrained")
        axes = figure.add_subplot()
        _decorate(axes, title, _subtitle([np.size(scores) for scores, _ in finals.values()]) + "; a dot for each seed")
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
        axes.set_yticks(range(len(finals)), list(map(literal, finals)))
        axes.set_ylim(len(finals) - 0.4, -0.6)
        axes.set_xlim(units.limits(axes.get_xlim(), axes.dataLim.intervalx))
        axes.set_xlabel(literal(units.score))
        axes.grid(axis="x")
    return figure


def _subtitle(counts: Sequence[int]) -> str:
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "one seed"
    seeds = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    return f"interquartile mean over {seeds}" + (", 95% bootstrap interval" if most >= MIN_SCORES else "")


def _decorate(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(literal(title), loc="left", fontweight="bold", fontsize=12, pad=20)
    axes.annotate(subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=9, alpha=0.7)
    axes.tick_params(length=3, width=0.8)


def middles(edges: Floats) -> Floats:
    """The middles of bins."""
    return (edges[:-1] + edges[1:]) / 2


def draw_line(axes: Axes, edges: Floats, line: Estimate, style: LineStyle, *, shade: float, width: float = 1.8) -> None:
    """A curve with its interval as a shaded area."""
    axes.fill_between(middles(edges), line.low, line.high, color=style.color, alpha=shade, linewidth=0)
    axes.plot(middles(edges), line.value, color=style.color, linewidth=width, linestyle=style.dashes)


def _label_ends(axes: Axes, lines: Mapping[str, Estimate], styles: Mapping[str, LineStyle]) -> None:
    """Write each name at the end of its line, moved up or down as little as needed to avoid overlaps."""
    low, high = axes.get_ylim()
    ends = {name: line.value[np.isfinite(line.value)][-1:] for name, line in lines.items()}
    labels = sorted((float(end[0]), name) for name, end in ends.items() if end.size)
    if not labels:
        return
    heights = [(end - low) / (high - low) for end, _ in labels]
    for height, place, (_, name) in zip(heights, spread_labels(heights, gap=0.052), labels, strict=True):
        color, dashes = styles[name]
        style: dict[str, Any] = {"color": color, "transform": axes.transAxes, "clip_on": False}
        axes.plot([1.0, 1.022], [height, place], linewidth=0.7, alpha=0.7, **style)
        axes.plot([1.024, 1.062], [place, place], linewidth=1.8, linestyle=dashes, **style)
        label, kind = literal(name), "axes fraction"
        axes.annotate(label, (1.07, place), xycoords=kind, color=color, fontweight="bold", va="center")


def spread_labels(positions: ArrayLike, gap: float) -> Floats:
    """Positions in [0, 1], at least `gap` apart, with the least squared distance to ascending ones.

    After subtracting i · gap from the i-th, the positions need only ascend: isotonic regression, clipped to the bounds.
    If they do not all fit, the gap becomes smaller.
    """
    positions = np.asarray(positions, float)
    gap = min(gap, 1.0 / max(len(positions) - 1, 1))
    offsets = gap * np.arange(len(positions))
    return np.clip(isotonic_regression(positions - offsets).x, 0.0, 1.0 - offsets[-1]) + offsets

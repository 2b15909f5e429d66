"""Figures: learning curves with intervals over seeds, and the final performance of each seed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from jaxpg.errors import UserError
from jaxpg.files import replace_file
from jaxpg.printable import printable
from jaxpg.report.statistics import MIN_SCORES, Estimate, Floats, binned, bootstrap

BINS = 100
FORMATS = (".png", ".svg", ".pdf")


# The palette of Okabe and Ito for colour-blind readers, without the colours that are invisible on white or on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES: tuple[str | tuple, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
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


def color(index: int) -> str:
    """Colour of the algorithm with this index in a figure, table or page."""
    return COLORS[index % len(COLORS)]


def line_style(index: int) -> Any:
    """Dashes of the algorithm with this index: solid for the first round of colours."""
    return LINES[index // len(COLORS) % len(LINES)]


def step_grid(curves: Curves, bins: int = BINS) -> Floats:
    """Edges of equal bins from zero to the steps of the longest run, `[bins + 1]`."""
    return np.linspace(0.0, max(float(np.nanmax(steps, initial=0.0)) for steps, _ in curves.values()) or 1.0, bins + 1)


def learning_curve(curves: Curves, path: str | Path, *, title: str, threshold: float | None = None) -> None:
    """Draw learning curves over environment steps into a file (PNG, SVG or PDF, by its suffix).

    Each line is the interquartile mean over seeds of the returns, averaged within a hundredth of the longest run; the
    shaded area is its 95% bootstrap interval, where there are seeds enough for one. A line covers the steps at which
    every seed has a return.

    Args:
        curves: label -> (steps `[N]` or `[N, S]`, returns `[N, S]`, NaN where no episode ended).
        path: the file to write.
        title: the task.
        threshold: return drawn as a dashed line.

    Raises:
        UserError: there is no curve, shapes do not match, or the suffix is none of FORMATS.
    """
    save(curves_figure(curves, title=title, threshold=threshold), path)


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
    """A figure as an `<svg>` element without background, with its INK replaced by the text colour of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def literal(text: str) -> str:
    """Text for matplotlib that is drawn as it is: between two dollar signs matplotlib would read a formula."""
    return printable(text).replace("$", r"\$")


def curves_figure(curves: Curves, *, title: str, threshold: float | None = None) -> Figure:
    """The figure of `learning_curve`."""
    if not curves:
        raise UserError("There is no curve to draw: give at least one run.")
    edges = step_grid(curves)
    lines = {name: bootstrap(binned(steps, returns, edges)) for name, (steps, returns) in curves.items()}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        _decorate(axes, title, _subtitle([np.shape(returns)[1] for _, returns in curves.values()]))
        axes.set_xlabel("environment steps")
        axes.set_ylabel("episode return")
        axes.xaxis.set_major_formatter(EngFormatter(sep="\N{THIN SPACE}"))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y")
        for index, line in enumerate(lines.values()):
            _draw_line(axes, edges, line, index, shade=0.17 if len(lines) <= len(COLORS) else 0.07)
        known = np.isfinite([line.value for line in lines.values()]).any(axis=0)
        axes.set_xlim(0, edges[1:][known].max(initial=0.0) or edges[-1])
        if threshold is not None:
            axes.axhline(threshold, color=INK, alpha=0.55, linewidth=0.9, dashes=(4, 3), zorder=1)
            # below the line on the right, where curves that have reached the threshold are above the text
            place = (0.994, threshold), axes.get_yaxis_transform()
            axes.annotate(f"threshold {threshold:g}", place[0], (0, -4), xycoords=place[1], textcoords="offset points",
                          fontsize=8, alpha=0.7, ha="right", va="top")  # fmt: skip
        _label_ends(axes, edges, lines)
    return figure


def finals_figure(
    finals: Mapping[str, tuple[ArrayLike, Estimate]], *, title: str, threshold: float | None = None
) -> Figure:
    """Every seed's final performance as a dot, with the interquartile mean and its interval over them.

    Args:
        finals: label -> (scores [S], their interquartile mean with interval).
        title: of the figure.
        threshold: score drawn as a dashed line.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.5 + 0.36 * len(finals)), layout="constrained")
        axes = figure.add_subplot()
        _decorate(axes, title, _subtitle([np.size(scores) for scores, _ in finals.values()]) + "; a dot for each seed")
        for index, (scores, estimate) in enumerate(finals.values()):
            axes.scatter(
                scores, np.full(np.size(scores), index + 0.24), s=26, color=color(index), alpha=0.35, linewidths=0
            )
            axes.plot([estimate.low, estimate.high], [index, index], color=color(index), linewidth=2.4)
            axes.plot(estimate.value, index, "o", color=color(index), markersize=7)
        if threshold is not None:
            axes.axvline(threshold, color=INK, alpha=0.55, linewidth=0.9, dashes=(4, 3), zorder=1)
        axes.set_yticks(range(len(finals)), list(map(literal, finals)))
        axes.set_ylim(len(finals) - 0.4, -0.6)
        axes.set_xlabel("episode return")
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


def _draw_line(axes: Axes, edges: Floats, line: Estimate, index: int, shade: float) -> None:
    centers = (edges[:-1] + edges[1:]) / 2
    axes.fill_between(centers, line.low, line.high, color=color(index), alpha=shade, linewidth=0)
    axes.plot(centers, line.value, color=color(index), linewidth=1.8, linestyle=line_style(index))


def _label_ends(axes: Axes, edges: Floats, lines: Mapping[str, Estimate]) -> None:
    """Write each name at the end of its line, moved up or down as little as needed to avoid overlaps."""
    low, high = axes.get_ylim()
    ends = {name: line.value[np.isfinite(line.value)][-1:] for name, line in lines.items()}
    labels = sorted((float(end[0]), index, name) for index, (name, end) in enumerate(ends.items()) if end.size)
    if not labels:
        return
    heights = [(end - low) / (high - low) for end, _, _ in labels]
    for height, place, (_, index, name) in zip(heights, spread_labels(heights, gap=0.052), labels, strict=True):
        style: dict[str, Any] = {"color": color(index), "transform": axes.transAxes, "clip_on": False}
        axes.plot([1.0, 1.022], [height, place], linewidth=0.7, alpha=0.7, **style)
        axes.plot([1.024, 1.062], [place, place], linewidth=1.8, linestyle=line_style(index), **style)
        label, kind = literal(name), "axes fraction"
        axes.annotate(label, (1.07, place), xycoords=kind, color=color(index), fontweight="bold", va="center")


def spread_labels(positions: ArrayLike, gap: float) -> Floats:
    """Positions in [0, 1], at least `gap` apart, with the least squared distance to ascending ones.

    After subtracting i · gap from the i-th, the positions need only ascend: isotonic regression, clipped to the bounds.
    If they do not all fit, the gap becomes smaller.
    """
    positions = np.asarray(positions, float)
    gap = min(gap, 1.0 / max(len(positions) - 1, 1))
    offsets = gap * np.arange(len(positions))
    return np.clip(isotonic_regression(positions - offsets).x, 0.0, 1.0 - offsets[-1]) + offsets

"""What figures are drawn with: their style, axes, lines and labels, and how they are written."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, ScalarFormatter
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from jaxpg.errors import UserError
from jaxpg.files import replace_file
from jaxpg.report.hover import add_hover, number_dots, with_titles
from jaxpg.report.palette import LineStyle
from jaxpg.report.statistics import Estimate, Floats, middles
from jaxpg.user_input.printable import printable

NAME_WIDTH = 24  # letters after which the name of a line is broken
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


def check_format(path: Path) -> None:
    """Refuse a file for a figure whose suffix is none of FORMATS: a UserError."""
    if path.suffix not in FORMATS:
        raise UserError(f"The file of a figure must end in {', '.join(FORMATS)}, not {path}.")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file, completely or not at all.

    Raises:
        UserError: its suffix is none of FORMATS.
    """
    path = Path(path)
    check_format(path)
    replace_file(path, _written(figure, format=path.suffix[1:], dpi=200, facecolor="white"))


def _written(figure: Figure, **settings: Any) -> bytes:
    """A figure in a format; letters that the font lacks, as of a Chinese name, are boxes without a warning."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        figure.savefig(buffer, **settings)
    return buffer.getvalue()


def inline_svg(figure: Figure) -> str:
    """A figure as an `<svg>` element without background, its INK replaced by the text colour of the page.

    Values are shown where a mouse rests on dots (`hover`). A page has each id once: groups have none, which would be
    axes_1 in every figure, and those of marks and clips, which matplotlib makes of their shapes, begin with a checksum.
    """
    texts = number_dots(figure)
    svg = _written(figure, format="svg", transparent=True, metadata={"Date": None}).decode()
    svg = with_titles(svg[svg.index("<svg") :].replace(INK, "currentColor"), texts)
    own = f"f{crc32(svg.encode()):08x}"
    return re.sub(r'(\bid="|#)(?=[mp][0-9a-f]{10}\b)', rf"\g<1>{own}", re.sub('<g id="[^"]*"', "<g", svg))


def literal(text: str, keep: str = "") -> str:
    """Text for matplotlib that is drawn as it is: between two dollar signs matplotlib would read a formula.

    Args:
        text: what is drawn.
        keep: the control characters that are meant, as of `printable`.
    """
    return printable(text, keep=keep).replace("$", r"\$")


def scale_steps(axes: Axes, *, logarithmic: bool, ticks: int = 6) -> None:
    """The axis of steps, with prefixes: 10 k, 1 M."""
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))  # also where there are no steps
    axes.xaxis.set_major_formatter(EngFormatter(sep="\N{THIN SPACE}"))


def scale_scores(axis: Axis, limits: tuple[float, float]) -> tuple[float, float]:
    """The limits of an axis of scores, wider where scores differ in their rounding alone.

    Its numbers are written in full, very large and very small ones with prefixes: matplotlib would write a common
    summand or factor at the end of the axis, over the subtitle.
    """
    low, high = limits
    greatest = max(abs(low), abs(high))
    plain = 1e-3 < greatest < 1e5
    axis.set_major_formatter(ScalarFormatter(useOffset=False) if plain else EngFormatter(sep="\N{THIN SPACE}"))
    if high - low < 1e-4 * greatest:  # equal returns in float32 would be a cliff
        return (low + high) / 2 - 0.05 * greatest, (low + high) / 2 + 0.05 * greatest
    return low, high


def draw_named(axes: Axes, edges: Floats, name: str, line: Estimate, style: LineStyle) -> None:
    """A curve whose name and values are shown where a mouse rests on it."""
    draw_line(axes, edges, line, style, shade=0.17)
    every = len(edges) // 25
    add_hover(axes, middles(edges)[::every], line.value[::every], name)


def draw_threshold(axes: Axes, threshold: float) -> None:
    """A dashed line at a score."""
    axes.axhline(threshold, color=INK, alpha=0.55, linewidth=0.9, dashes=(4, 3), zorder=1)


def add_title(figure: Figure, title: str, subtitle: str) -> None:
    """A title and a line below it over all axes of a figure whose layout is constrained."""
    height = figure.get_figheight()
    layout = figure.get_layout_engine()
    assert isinstance(layout, ConstrainedLayoutEngine)
    layout.set(rect=(0, 0, 1, 1 - 0.52 / height))
    figure.text(0.01, 1 - 0.1 / height, literal(title), fontweight="bold", fontsize=12, va="top")
    figure.text(0.01, 1 - 0.34 / height, subtitle, fontsize=9, alpha=0.7, va="top")


def decorate(axes: Axes, title: str, subtitle: str) -> None:
    """A title and a line below it over axes."""
    axes.set_title(literal(title), loc="left", fontweight="bold", fontsize=12, pad=20)
    axes.annotate(subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=9, alpha=0.7)
    axes.tick_params(length=3, width=0.8)


def draw_line(axes: Axes, edges: Floats, line: Estimate, style: LineStyle, *, shade: float, width: float = 1.8) -> None:
    """A curve with its interval as a shaded area."""
    axes.fill_between(middles(edges), line.low, line.high, color=style.color, alpha=shade, linewidth=0)
    stroke: dict[str, Any] = {"color": style.color, "linewidth": width, "linestyle": style.dashes}
    axes.plot(middles(edges), line.value, marker=marker_of(line.value), **stroke)


def marker_of(values: Floats) -> str:
    """A dot for a single value, as of a run with one row, which has no line."""
    return "o" if np.isfinite(values).sum() == 1 else ""


def label_ends(axes: Axes, lines: Mapping[str, Estimate], styles: Mapping[str, LineStyle], score: str) -> None:
    """Write each name at the end of its line, moved up or down as little as needed to avoid overlaps.

    The name of a line without values is at the bottom, and says that seeds have no `score`: all of them, or some.
    """
    low, high = axes.get_ylim()
    ends = {name: line.value[np.isfinite(line.value)][-1:] for name, line in lines.items()}
    labels = sorted((float(end[0]) if end.size else low, name) for name, end in ends.items())
    heights = [(end - low) / (high - low) for end, _ in labels]
    texts = [broken(name if ends[name].size else f"{name}: seeds without {score}") for _, name in labels]
    gap = 0.052 * max(text.count("\n") + 1 for text in texts)
    for height, place, text, (_, name) in zip(heights, spread_labels(heights, gap), texts, labels, strict=True):
        color, dashes = styles[name]
        style: dict[str, Any] = {"color": color, "transform": axes.transAxes, "clip_on": False}
        if ends[name].size:
            axes.plot([1.0, 1.022], [height, place], linewidth=0.7, alpha=0.7, **style)
        axes.plot([1.024, 1.062], [place, place], linewidth=1.8, linestyle=dashes, **style)
        axes.annotate(text, (1.07, place), xycoords="axes fraction", color=color, fontweight="bold", va="center")


def broken(name: str) -> str:
    """The name of a line, which may be long, in rows of at most NAME_WIDTH letters."""
    return "\n".join(map(literal, textwrap.wrap(printable(name), NAME_WIDTH)))


def spread_labels(positions: ArrayLike, gap: float) -> Floats:
    """Positions in [0, 1], at least `gap` apart, with the least squared distance to ascending ones.

    After subtracting i · gap from the i-th, the positions need only ascend: isotonic regression, clipped to the bounds.
    If they do not all fit, the gap becomes smaller.
    """
    positions = np.asarray(positions, float)
    gap = min(gap, 1.0 / max(len(positions) - 1, 1))
    offsets = gap * np.arange(len(positions))
    return np.clip(isotonic_regression(positions - offsets).x, 0.0, 1.0 - offsets[-1]) + offsets

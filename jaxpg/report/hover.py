"""Values that a mouse over a figure of a page shows: a `<title>` for every dot, without a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from jaxpg.user_input.printable import printable

_LABEL = "_hover\n"  # matplotlib writes no label that begins with an underscore


def add_hover(axes: Axes, x: ArrayLike, y: ArrayLike, name: str) -> None:
    """Invisible dots along a curve that show its value: "ppo: 498.2 at 12,000"."""
    points = [(a, b) for a, b in zip(np.ravel(x), np.ravel(y), strict=True) if np.isfinite(a) and np.isfinite(b)]
    if points:
        places = np.array(points)
        dots = axes.scatter(places[:, 0], places[:, 1], s=60, alpha=0.0, linewidths=0)
        show_on_hover(dots, [f"{name}: {value:.4g} at {round(steps):,}" for steps, value in points])


def show_on_hover(dots: PathCollection, texts: Sequence[str]) -> None:
    """Let dots show these texts, one each."""
    offsets: np.ndarray = np.ma.filled(np.ma.asarray(dots.get_offsets(), float), np.nan)
    drawn = np.flatnonzero(np.isfinite(offsets).all(1))
    dots.set_label(_LABEL + "\n".join(printable(texts[i]) for i in drawn.tolist()))


def number_dots(figure: Figure) -> list[list[str]]:
    """Name the groups of dots in the SVG of a figure, for `with_titles`; the texts of each."""
    groups = [dots for dots in figure.findobj(PathCollection) if str(dots.get_label()).startswith(_LABEL)]
    for number, dots in enumerate(groups):
        dots.set_gid(f"hover-{number}")
    return [str(dots.get_label()).removeprefix(_LABEL).split("\n") for dots in groups]


def with_titles(svg: str, texts: Sequence[Sequence[str]]) -> str:
    """An SVG with a `<title>` in every dot of the groups that `number_dots` has named.

    matplotlib clips dots outside of the canvas into other ones: a group of another size than its texts has no titles.
    """

    def titled(group: re.Match[str]) -> str:
        titles = iter(texts[int(group[1])])
        if len(re.findall("<use ", group[2])) != len(texts[int(group[1])]):
            return group[2]
        return re.sub(r"(<use [^>]*?)/>", lambda use: f"{use[1]}><title>{escape(next(titles))}</title></use>", group[2])

    return re.sub(r'<g id="hover-(\d+)"(>.*?</g>\s*</g>)', lambda group: f"<g{titled(group)}", svg, flags=re.DOTALL)

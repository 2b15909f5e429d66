"""A small antialiased drawing surface in scene units, and the record of a scene."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import hypot
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

PAPER, INK, QUIET, FAINT = "#fcfbf8", "#2b2f36", "#7d8590", "#e4e2dc"
BLUE, RED, GREEN, PINK, YELLOW, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
OVERSAMPLING = 3  # every pixel is the mean of 3 x 3
Point = tuple[float, float]
View = tuple[float, float, float, float]  # left, right, bottom, top


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib, in pixels."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


class Canvas:
    """A drawing surface; positions, lengths, line widths and text sizes are in scene units, x right and y up."""

    def __init__(self, view: View, width: int, background: str = PAPER) -> None:
        left, right, bottom, top = view
        self._left, self._top = left, top
        self._scale = width * OVERSAMPLING / (right - left)
        height = round(width * (top - bottom) / (right - left))
        self._image = Image.new("RGB", (width * OVERSAMPLING, height * OVERSAMPLING), background)
        self._draw = ImageDraw.Draw(self._image)

    def _pixel(self, point: Point) -> Point:
        return (float(point[0]) - self._left) * self._scale, (self._top - float(point[1])) * self._scale

    def picture_of(self, pixels: np.ndarray) -> None:
        """Fill all of it with a picture, `[H, W, 3]` bytes."""
        self._image.paste(Image.fromarray(pixels).resize(self._image.size))

    def line(self, points: Sequence[Point], color: str, width: float) -> None:
        """Connect points, with round joints and ends."""
        for (x0, y0), (x1, y1) in pairwise(points):
            half = width / 2 / max(hypot(x1 - x0, y1 - y0), 1e-9)
            dx, dy = (y0 - y1) * half, (x1 - x0) * half
            self.polygon([(x0 + dx, y0 + dy), (x1 + dx, y1 + dy), (x1 - dx, y1 - dy), (x0 - dx, y0 - dy)], color)
        for point in points:
            self.circle(point, width / 2, color)

    def polygon(self, points: Sequence[Point], color: str) -> None:
        """Fill the area within points."""
        self._draw.polygon([self._pixel(point) for point in points], fill=color)

    def circle(self, center: Point, radius: float, color: str) -> None:
        """Fill a disc."""
        x, y = self._pixel(center)
        r = radius * self._scale
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def box(self, left: float, bottom: float, right: float, top: float, color: str, radius: float = 0.0) -> None:
        """Fill a rectangle, its corners rounded."""
        corners = *self._pixel((left, top)), *self._pixel((right, bottom))
        self._draw.rounded_rectangle(corners, radius=radius * self._scale, fill=color)

    def arrow(self, start: Point, end: Point, color: str, width: float) -> None:
        """A line with a head at its end."""
        (x0, y0), (x1, y1) = start, end
        dx, dy = x1 - x0, y1 - y0
        length = max(hypot(dx, dy), 1e-9)
        ux, uy = dx / length * 2.2 * width, dy / length * 2.2 * width
        neck = x1 - ux, y1 - uy
        self.line([start, neck], color, width)
        self.polygon(
            [(x1, y1), (neck[0] - 0.8 * uy, neck[1] + 0.8 * ux), (neck[0] + 0.8 * uy, neck[1] - 0.8 * ux)], color
        )

    def text(self, center: Point, text: str, color: str, size: float) -> None:
        """Text around its centre."""
        self._draw.text(self._pixel(center), text, fill=color, font=font(round(size * self._scale)), anchor="mm")

    def stamp(self, other: Canvas) -> None:
        """Copy the picture of another canvas of the same view and width."""
        self._image.paste(other._image)

    def image(self) -> Image.Image:
        """The picture at its final size."""
        return self._image.reduce(OVERSAMPLING)


class Scene(NamedTuple):
    """How one episode is drawn.

    view: the visible area, in scene units.
    draw(canvas, t, state, action): draws one frame: step `t`, the innermost environment's state as numpy arrays, and
        the action taken next, None in the last frame.
    fps: default frames per second.
    actions: names of discrete actions.
    width: pixels.
    background: its colour.
    """

    view: View
    draw: Callable[[Canvas, int, Any, Any], None]
    fps: float
    actions: tuple[str, ...] = ()
    width: int = 480
    background: str = PAPER


def pictures_scene(size: tuple[int, ...], picture: Callable[[int, Any], np.ndarray]) -> Scene:
    """A scene of pictures of a size (height, width); `picture(t, state)` is `[H, W, 3]` bytes."""
    height, width = size
    return Scene(
        (0.0, float(width), 0.0, float(height)),
        lambda canvas, t, state, action: canvas.picture_of(picture(t, state)),
        fps=30,
        width=max(240, min(width, 480)),
    )

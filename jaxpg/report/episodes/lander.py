"""The scene of LunarLander: terrain, flags, craft and flames."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpg.envs import lunar_lander
from jaxpg.report.episodes.canvas import FAINT, INK, PAPER, QUIET, RED, YELLOW, Canvas, Point, Scene
from jaxpg.rollout.evaluation import RecordedEpisode
from jaxpg.types import Discrete, Env

_ACTIONS = ("none", "left engine", "main engine", "right engine")


def lunar_lander_scene(env: Env, episode: RecordedEpisode) -> Scene:
    """The craft above the ground between two flags; a flame is as long as its engine is strong."""
    discrete = isinstance(env.action_space, Discrete)

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        width = lunar_lander.WIDTH
        xs = np.linspace(0, width, len(state.terrain))
        ground = [(float(x), float(y)) for x, y in zip(xs, state.terrain, strict=True)]
        canvas.polygon([*ground, (width, -1.0), (0.0, -1.0)], FAINT)
        canvas.line(ground, QUIET, 0.06)
        level = ground[len(ground) // 2][1]
        for x in lunar_lander.PAD:
            canvas.line([(x, level), (x, level + 1.6)], QUIET, 0.05)
            canvas.polygon([(x, level + 1.6), (x + 0.8, level + 1.35), (x, level + 1.1)], YELLOW)
        main, side = (0.0, 0.0) if action is None else _power(action, discrete)
        hull, *legs = lunar_lander.outlines(state.craft)
        to_world = _frame(hull)
        if main > 0:
            canvas.polygon([to_world((x, y)) for x, y in ((-0.2, -0.33), (0.2, -0.33), (0.0, -0.4 - 1.0 * main))], RED)
        if side != 0:
            edge = np.sign(side) * -0.57
            flame = ((edge, 0.55), (edge, 0.25), (edge - 0.75 * side, 0.4))
            canvas.polygon([to_world(point) for point in flame], RED)
        for leg, touches in zip(legs, state.craft.on_ground, strict=True):
            canvas.polygon(leg, INK if touches else QUIET)
        canvas.polygon(hull, INK)
        canvas.circle(to_world((0.0, 0.22)), 0.17, PAPER)

    height = lunar_lander.HEIGHT
    return Scene((0.0, lunar_lander.WIDTH, 0.0, height + 0.7), draw, fps=50, actions=_ACTIONS, width=480)


def _power(action: Any, discrete: bool) -> tuple[float, float]:
    """How strong the main engine is, and the side ones: negative for the left engine."""
    if discrete:
        return float(action == 2), float({1: -1, 3: 1}.get(int(action), 0))
    main, side = (float(x) for x in np.clip(action, -1, 1))
    return (main + 1) / 2 if main > 0 else 0.0, side if abs(side) > 0.5 else 0.0


def _frame(hull: list[Point]) -> Any:
    """Takes a point of the hull's own coordinates to the world, given the hull's outline in the world."""
    corners = np.array(hull)
    right, left = corners[5], corners[2]  # (17, 0) and (-17, 0) of the original's pixels
    across = (right - left) / np.linalg.norm(right - left)
    middle, up = (right + left) / 2, np.array([-across[1], across[0]])
    return lambda point: tuple(middle + point[0] * across + point[1] * up)

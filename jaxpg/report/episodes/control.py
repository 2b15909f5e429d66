"""Scenes of classic control, with the geometry and units of gymnax's states."""

from __future__ import annotations

from math import cos, pi, sin
from typing import Any

import numpy as np

from jaxpg.report.episodes.canvas import BLUE, FAINT, GREEN, INK, PAPER, QUIET, RED, SKY, YELLOW, Canvas, Scene
from jaxpg.rollout.evaluation import RecordedEpisode
from jaxpg.types import Env


def cart_pole(env: Env, episode: RecordedEpisode) -> Scene:
    """A cart on a track that ends at its limits; an arrow shows the push."""

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        x, theta = float(state.x), float(state.theta)
        canvas.line([(-2.4, 0), (2.4, 0)], QUIET, 0.025)
        for end in (-2.4, 2.4):
            canvas.line([(end, -0.09), (end, 0.09)], QUIET, 0.025)
        canvas.box(x - 0.26, -0.14, x + 0.26, 0.14, INK, 0.05)
        canvas.line([(x, 0.08), (x + sin(theta), 0.08 + cos(theta))], YELLOW, 0.1)
        canvas.circle((x, 0.08), 0.045, PAPER)
        if action is not None:
            side = 1 if action == 1 else -1
            canvas.arrow((x + side * 0.34, 0), (x + side * 0.62, 0), BLUE, 0.05)

    return Scene((-2.7, 2.7, -0.55, 1.35), draw, fps=50, actions=("left", "right"))


def mountain_car(env: Env, episode: RecordedEpisode) -> Scene:
    """A car in a valley, with a flag at the goal."""
    continuous = env.name.startswith("MountainCarContinuous")
    goal = 0.45 if continuous else 0.5
    xs = np.linspace(-1.3, 0.7, 80)

    def height(x: float) -> float:
        return 0.45 * sin(3 * x) + 0.55

    hill = [*((float(x), height(x)) for x in xs), (0.7, -0.1), (-1.3, -0.1)]
    view, width, top = (-1.3, 0.7, -0.05, 1.3), 480, height(goal) + 0.2
    land = Canvas(view, width)
    land.polygon(hill, FAINT)
    land.line(hill[:-2], QUIET, 0.01)
    land.line([(goal, height(goal)), (goal, top)], INK, 0.01)
    land.polygon([(goal, top), (goal + 0.09, top - 0.035), (goal, top - 0.07)], RED)

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        canvas.stamp(land)
        x = float(state.position)
        slope = np.arctan(1.35 * cos(3 * x))
        along, up = np.array([cos(slope), sin(slope)]), np.array([-sin(slope), cos(slope)])
        ground = np.array([x, height(x)])
        corners = [(-0.075, 0.03), (-0.075, 0.07), (-0.035, 0.105), (0.035, 0.105), (0.075, 0.07), (0.075, 0.03)]
        canvas.polygon([tuple(ground + a * along + b * up) for a, b in corners], BLUE)
        for wheel in (-0.042, 0.042):
            canvas.circle(tuple(ground + wheel * along + 0.026 * up), 0.024, INK)
        push = 0.0 if action is None else (float(action[0]) if continuous else int(action) - 1)
        if abs(push) > 0.05:
            start = ground + 0.16 * up
            canvas.arrow(tuple(start), tuple(start + 0.16 * np.clip(push, -1, 1) * along), RED, 0.014)

    return Scene(view, draw, fps=30, actions=("left", "coast", "right"), width=width)


def acrobot(env: Env, episode: RecordedEpisode) -> Scene:
    """Two links below a pivot; the foot must rise above the line."""

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        first, second = float(state.joint_angle1), float(state.joint_angle1 + state.joint_angle2)
        elbow = sin(first), -cos(first)
        foot = elbow[0] + sin(second), elbow[1] - cos(second)
        canvas.line([(-2.3, 1), (2.3, 1)], GREEN if foot[1] > 1 else QUIET, 0.025)
        canvas.line([(0, 0), elbow], BLUE, 0.15)
        canvas.line([elbow, foot], SKY, 0.15)
        for joint in ((0.0, 0.0), elbow):
            canvas.circle(joint, 0.09, INK)

    return Scene((-2.4, 2.4, -2.3, 2.3), draw, fps=15, actions=("clockwise", "none", "anticlockwise"), width=400)


def pendulum(env: Env, episode: RecordedEpisode) -> Scene:
    """A rod on a motor; the arc shows the torque."""

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        theta = float(state.theta)
        canvas.line([(0, 0), (-sin(theta), cos(theta))], RED, 0.2)
        canvas.circle((0, 0), 0.06, INK)
        torque = 0.0 if action is None else float(np.clip(action[0], -2, 2))
        if abs(torque) > 0.05:
            arc = [(0.3 * -sin(a), 0.3 * cos(a)) for a in np.linspace(0, torque * pi / 4, 24)]
            canvas.line(arc, BLUE, 0.03)
            canvas.arrow(arc[-3], arc[-1], BLUE, 0.04)

    return Scene((-1.3, 1.3, -1.25, 1.25), draw, fps=20, width=400)

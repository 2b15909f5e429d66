"""Scenes on a board of cells: MinAtar, Catch, grid worlds; and observations, for environments without a scene."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from jaxpg.envs.gymnax_adapter import import_gymnax
from jaxpg.envs.tabular import TabularState
from jaxpg.envs.wrappers import Wrapped, unwrap
from jaxpg.report.episodes.canvas import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    PAPER,
    PINK,
    QUIET,
    RED,
    SKY,
    YELLOW,
    Canvas,
    Scene,
    pictures_scene,
)
from jaxpg.rollout.evaluation import RecordedEpisode
from jaxpg.types import Array, Discrete, Env, Tree

NIGHT = "#14171c"
MOST_VALUES = 12  # that are shown with their names
SMALLEST_IMAGE = 16  # rows and columns; what is smaller is a board
MINATAR = {  # colours by channel of the observation, later channels over earlier ones; names of actions
    "Breakout-MinAtar": ((SKY, PAPER, "#59626e", RED), ("stay", "left", "right")),
    "Asterix-MinAtar": ((SKY, RED, "#6b3a1d", YELLOW), ("stay", "left", "up", "right", "down")),
    "Freeway-MinAtar": ((YELLOW, SKY, "#1d3d52", "#1f4a66", "#22587b", "#256690", "#2873a5"), ("stay", "up", "down")),
    "SpaceInvaders-MinAtar": ((SKY, GREEN, GREEN, GREEN, PAPER, RED), ("stay", "left", "right", "fire")),
    "Seaquest-MinAtar": (
        (YELLOW, "#8a6410", PAPER, "#3a4350", RED, PINK, GREEN, SKY, BLUE, "#f2d5e5"),
        ("stay", "left", "up", "right", "down", "fire"),
    ),
}


def minatar(env: Env, episode: RecordedEpisode) -> Scene:
    """The ten-by-ten board, a colour per channel."""
    colors, actions = MINATAR[env.name]
    boards = np.asarray(jax.jit(jax.vmap(import_gymnax().make(env.name)[0].get_obs))(unwrap(episode.states)))
    names = actions if env.action_space == Discrete(len(actions)) else ()  # () for the full set of six actions
    return _board(boards, colors, fps=15, actions=names)


def _board(boards: np.ndarray, colors: tuple[str, ...], fps: float, actions: tuple[str, ...] = ()) -> Scene:
    """Boards `[T, rows, columns, channels]`, a colour per channel."""
    _, rows, columns, _ = boards.shape

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        for channel, color in enumerate(colors):
            for row, column in zip(*np.nonzero(boards[t, :, :, channel]), strict=True):
                y = rows - 1 - row
                canvas.box(column + 0.04, y + 0.04, column + 0.96, y + 0.96, color, 0.12)

    view = (-0.2, columns + 0.2, -0.2, rows + 0.2)
    return Scene(view, draw, fps, actions, width=min(400, max(240, 36 * columns)), background=NIGHT)


def catch(env: Env, episode: RecordedEpisode) -> Scene:
    """A falling ball and the paddle that must catch it."""
    state = unwrap(episode.states)
    rows, columns = int(state.paddle_y[0]) + 1, 2 * int(state.paddle_x[0]) + 1  # it starts in the middle of the floor
    row, column = np.divmod(np.arange(rows * columns).reshape(rows, columns), columns)
    places = ((state.paddle_y, state.paddle_x), (state.ball_y, state.ball_x))
    layers = [(row == y[:, None, None]) & (column == x[:, None, None]) for y, x in places]
    return _board(np.stack(layers, axis=-1), (SKY, YELLOW), fps=5, actions=("left", "stay", "right"))


def four_rooms(env: Env, episode: RecordedEpisode) -> Scene:
    """Four rooms, the goal and the agent."""
    walls = np.asarray(import_gymnax().make(env.name)[0].occupied_map, bool)
    row, column = (int(i) for i in unwrap(episode.states).goal[0])
    return _world(
        walls, {(row, column): 1.0}, cell=lambda state: state.pos, actions=("up", "right", "down", "left"), fps=10
    )


def grid_world(
    env: Env, episode: RecordedEpisode, *, actions: tuple[str, ...] = ("left", "down", "right", "up")
) -> Scene:
    """FrozenLake, the cliff and grid worlds, by the names of their actions.

    The map is explored by trying every action in every cell.
    """
    walls, rewards = _explore(env, jax.tree.map(lambda x: x[0], episode.states))
    columns = walls.shape[1]

    def cell(state: Any) -> tuple[int, int]:
        return divmod(int(state.position), columns)

    return _world(walls, rewards, cell, actions, fps=5)


_TRIES = 32  # of every action in every cell, since moves may be random
_STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}


def _world(
    walls: np.ndarray,
    rewards: dict[tuple[int, int], float],
    cell: Callable[[Any], tuple[int, int]],
    actions: tuple[str, ...],
    fps: float,
) -> Scene:
    """A floor plan with walls, terminal cells with their rewards, and the agent with the direction of its action.

    Args:
        walls: [rows, columns] bool.
        rewards: (row, column) -> reward of a terminal cell: green above zero and where it is the only one, red below, a
            hole at zero.
        cell: state -> (row, column) of the agent.
        actions: their names, keys of `_STEPS`.
        fps: frames per second.
    """
    rows, columns = walls.shape
    view, width = (-0.2, columns + 0.2, -0.2, rows + 0.2), min(400, max(240, 60 * columns))
    floor = Canvas(view, width)
    for row, column in np.ndindex(rows, columns):
        x, y = column, rows - 1 - row
        value = rewards.get((row, column))
        color = (
            QUIET if walls[row, column] else FAINT if not value else GREEN if value > 0 or len(rewards) == 1 else RED
        )
        floor.box(x + 0.03, y + 0.03, x + 0.97, y + 0.97, color, 0.1)
        if value == 0:
            floor.circle((x + 0.5, y + 0.5), 0.36, INK)
        elif value is not None:
            floor.text((x + 0.5, y + 0.5), f"{value:+.3g}".replace("-", "−"), PAPER, 0.24)

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        canvas.stamp(floor)
        row, column = (int(i) for i in cell(state))
        x, y = column + 0.5, rows - 0.5 - row
        canvas.circle((x, y), 0.27, BLUE)
        if action is not None:
            dx, dy = _STEPS[actions[int(action)]]
            canvas.arrow((x - 0.16 * dx, y - 0.16 * dy), (x + 0.2 * dx, y + 0.2 * dy), PAPER, 0.07)

    return Scene(view, draw, fps, actions, width)


def _explore(env: Env, state: Tree) -> tuple[np.ndarray, dict[tuple[int, int], float]]:
    """The floor plan of a grid world: walls `[rows, columns]`, and the rewards of its terminal cells.

    Vertical neighbours are `columns` apart in the numbering of the cells; unreachable cells are walls. Where no move is
    vertical, all cells up to the last one that can be reached are one row.
    """

    def attempt(cell: Array, action: Array, key: Array) -> tuple[Array, Array, Array]:
        after, timestep = env.step(key, _move_agent(state, cell), action)
        return unwrap(after).position, timestep.reward, timestep.discount == 0

    sizes = prod(env.observation_space.shape), len(_STEPS), _TRIES
    origin, action, _ = (x.reshape(-1) for x in np.indices(sizes))
    keys = jax.random.split(jax.random.key(0), origin.size)
    reached, reward, ended = (np.asarray(x) for x in jax.jit(jax.vmap(attempt))(origin, action, keys))
    moved = reached != origin
    terminal = set(reached[ended & moved].tolist())
    paths = set(zip(origin[moved].tolist(), reached[moved].tolist(), strict=True))
    reachable = {int(unwrap(state).position)}
    while new := {after for before, after in paths if before in reachable} - reachable:
        reachable |= new
    lengths = {abs(after - before) for before, after in paths if before in reachable}
    columns = max(lengths - {1}, default=max(reachable) + 1)
    walls = ~np.isin(np.arange((max(reachable) // columns + 1) * columns), list(reachable)).reshape(-1, columns)
    rewards = {divmod(cell, columns): float(reward[moved & (reached == cell)].max()) for cell in terminal & reachable}
    return walls, rewards


def _move_agent(state: Tree, cell: Array) -> Tree:
    """The state with the agent in this cell."""
    if isinstance(state, Wrapped):
        return state._replace(inner=_move_agent(state.inner, cell))
    return state._replace(position=cell) if isinstance(state, TabularState) else state.replace(position=cell)


def observations(env: Env, episode: RecordedEpisode) -> Scene:
    """Binary observations with rows and columns as a board; images; a few numbers with their names, or many as bars.

    An image has at least SMALLEST_IMAGE rows and columns and numbers between 0 and 1: in colour where it has three
    channels, else its last channel in grey, which of stacked frames is the newest. The numbers are those of the state,
    where it is a record of MOST_VALUES scalars at most, else the observation's.
    """
    frames = np.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(episode.observations)], axis=1)
    shape = np.shape(jax.tree.leaves(episode.observations)[0])[1:]
    if len(shape) in (2, 3) and np.isin(frames, (0, 1)).all():
        boards = frames.reshape(len(frames), *shape[:2], -1)
        colors = (SKY, YELLOW, RED, GREEN, PINK, PAPER, BLUE, QUIET)
        return _board(boards, tuple(colors[c % len(colors)] for c in range(boards.shape[-1])), fps=10)
    if len(shape) == 3 and min(shape[:2]) >= SMALLEST_IMAGE and frames.min() >= 0 and frames.max() <= 1:
        return _images(frames.reshape(len(frames), *shape))
    fields = jax.tree_util.tree_leaves_with_path(unwrap(episode.states))
    if 0 < len(fields) <= MOST_VALUES and all(np.ndim(x) == 1 for _, x in fields):
        names = [jax.tree_util.keystr(path, simple=True, separator=".") or "state" for path, _ in fields]
        return _values(names, np.stack([np.asarray(x, float) for _, x in fields], axis=1))
    if frames.shape[1] <= MOST_VALUES:
        return _values([f"observation {i}" for i in range(frames.shape[1])], frames)
    return _bars(frames)


def _images(frames: np.ndarray) -> Scene:
    """Images `[T, H, W, C]` of numbers between 0 and 1."""
    colors = frames if frames.shape[-1] == 3 else np.repeat(frames[..., -1:], 3, axis=-1)
    return pictures_scene(frames.shape[1:3], lambda t, state: np.round(255 * colors[t]).astype(np.uint8))


def _values(names: Sequence[str], numbers: np.ndarray) -> Scene:
    """Named numbers `[T, n]`, a line each: name, place between the least and the most of the episode, value."""
    lows, highs = numbers.min(0), numbers.max(0)
    left, right, row = 150.0, 320.0, 34.0
    top = row * len(names)

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        for i, name in enumerate(names):
            y, (low, high), value = top - row * (i + 0.4), (lows[i], highs[i]), numbers[t, i]
            canvas.text((75, y), name if len(name) <= 20 else f"{name[:19]}…", INK, 11)
            canvas.line([(left, y), (right, y)], FAINT, 4)
            x = left + (right - left) * ((value - low) / (high - low) if high > low else 0.5)
            canvas.circle((x, y), 5, BLUE)
            for end, bound in ((left, low), (right, high)):
                canvas.text((end, y - 13), f"{bound:.3g}".replace("-", "−"), QUIET, 9)
            canvas.text((365, y), f"{value:.3g}".replace("-", "−"), INK, 11)

    return Scene((0.0, 400.0, 0.0, top), draw, fps=10, width=400)


def _bars(frames: np.ndarray) -> Scene:
    """Vectors `[T, n]` as bars from zero; each entry is divided by its largest magnitude."""
    count = frames.shape[1]
    heights = frames / np.maximum(np.abs(frames).max(axis=0), 1e-9)

    def draw(canvas: Canvas, t: int, state: Any, action: Any) -> None:
        for entry, height in enumerate(heights[t]):
            left, right = 2 * (entry + 0.12) / count, 2 * (entry + 0.88) / count
            canvas.box(left, min(height, 0.0), right, max(height, 0.0), BLUE if height > 0 else RED)
        canvas.line([(0, 0), (2, 0)], QUIET, 0.008)

    return Scene((-0.1, 2.1, -1.1 if (frames < 0).any() else -0.1, 1.1), draw, fps=10, width=400)

"""Worlds whose P and R are known: grids, FrozenLake, the cliff, Taxi, a random walk, random processes.

Grids count their cells row by row from the top left: the state of a cell is `row * columns + column`. Actions of a grid
have the order of Gymnasium's environment.

Every world is made by one jitted function, in 0.2 to 0.5 s. Operation by operation XLA compiles each, in 1 to 3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpg.envs.mdp_records import MDP, AnyMDP, SparseMDP, is_traced
from jaxpg.envs.tabular import to_dense
from jaxpg.errors import UserError
from jaxpg.types import Array, Key, Scalar

# Left, down, right, up, as in FrozenLake: the neighbours of an action in this cyclic order are perpendicular to it.
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_CLIFF_MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
_LAKES = {
    4: "SFFF FHFH FFFH HFFG",
    8: "SFFFFFFF FFFFFFFF FFFHFFFF FFFFFHFF FFFHFFFF FHHFFFHF FHFFHFHF FFFHFFFG",
}
_TAXI_MAP = ("R: | : :G", " : | : : ", " : : : : ", " | : | : ", "Y| : |B: ")
_TAXI_STANDS = ((0, 0), (0, 4), (4, 0), (4, 3))


class Grid(NamedTuple):
    """How the states of a world lie on a grid.

    rows, columns: its size.
    labels: by cell (row, column), of those without a value: "" for a wall, else what ends the episode there.
    moves: (down, right) of each action.
    """

    rows: int
    columns: int
    labels: Mapping[tuple[int, int], str]
    moves: Sequence[tuple[int, int]] = _MOVES


Cell = tuple[ArrayLike, ArrayLike]
"""The row and the column of a cell; negative ones count from the end."""


def sparse_grid_world(
    rows: int = 8,
    columns: int = 8,
    *,
    living_cost: Scalar = 0.04,
    slip: Scalar = 0.2,
    walls: Sequence[tuple[int, int]] = (),
    goal: Cell = (0, -1),
    trap: Cell = (1, -1),
    start: Cell = (-1, 0),
) -> SparseMDP:
    """The grid of `grid_world` with three outcomes per action: ahead, and to either side."""
    _check_grid(rows, columns, slip, walls, (goal, trap, start))
    cells = tuple((row, column) for row, column in walls)
    return _grid(rows, columns, cells, living_cost, _slipping(slip), goal, trap, start)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _grid(
    rows: int,
    columns: int,
    walls: tuple[tuple[int, int], ...],
    living_cost: Scalar,
    slipping: Sequence[Scalar],
    goal: Cell,
    trap: Cell,
    start: Cell,
) -> SparseMDP:
    at_goal, at_trap, at_start = (_at(cell, rows, columns) for cell in (goal, trap, start))
    successors = _with_sides(_neighbours(rows, columns, walls))
    rewards = (1.0 * at_goal - at_trap - living_cost)[successors]
    terminal = at_goal | at_trap | _is_wall(rows, columns, walls)
    return _end_at(SparseMDP(successors, _of_sides(slipping, successors), rewards, 1.0 * at_start, terminal))


def grid_world(
    rows: int = 8,
    columns: int = 8,
    *,
    living_cost: Scalar = 0.04,
    slip: Scalar = 0.2,
    walls: Sequence[tuple[int, int]] = (),
    goal: Cell = (0, -1),
    trap: Cell = (1, -1),
    start: Cell = (-1, 0),
) -> MDP:
    """The textbook's grid: +1 in the top right corner, -1 in the cell below it, start in the bottom left corner.

    A move into a wall or over the edge stays in place. `grid_world(3, 4, walls=[(1, 1)])` is the 4x3 world of Russell
    & Norvig, "Artificial Intelligence: A Modern Approach" (4th ed.), section 17.1. Actions left, down, right, up. All
    but the shape and the walls may be traced.

    Args:
        rows: at least 2.
        columns: at least 2.
        living_cost: subtracted from the reward of every step.
        slip: probability that a move goes to the side, half of it to either side.
        walls: cells (row, column) that cannot be entered; as states they are terminal, with the value 0.
        goal: the cell with reward +1, where the episode ends.
        trap: the cell with reward -1, where the episode ends.
        start: the first cell.

    Raises:
        UserError: a grid that is too small, a slip that is not a probability, a cell outside of the grid, or two of
            goal, trap, start and the walls in the same cell.
    """
    return to_dense(
        sparse_grid_world(
            rows, columns, living_cost=living_cost, slip=slip, walls=walls, goal=goal, trap=trap, start=start
        )
    )


@partial(jax.jit, static_argnames=("size", "slippery"))
def frozen_lake(size: int = 4, *, slippery: bool = True) -> MDP:
    """Gymnasium's FrozenLake-v1: reach the goal (reward 1) over ice with holes (reward 0, the end).

    On slippery ice each of the intended direction and its two perpendiculars has probability 1/3. Actions left, down,
    right, up.

    Args:
        size: 4 or 8, the two standard maps of Gymnasium.
        slippery: whether moves can go to the side.

    Raises:
        UserError: any other size.
    """
    if size not in _LAKES:
        raise UserError(f"frozen_lake: size must be 4 or 8, not {size!r}.")
    tiles = np.array([list(row) for row in _LAKES[size].split()]).ravel()
    successors = _with_sides(_neighbours(size, size))
    probabilities = _of_sides(_slipping(2 / 3 if slippery else 0.0), successors)
    rewards = jnp.asarray(1.0 * (tiles == "G"))[successors]
    start, terminal = jnp.eye(size * size)[0], jnp.asarray(np.isin(tiles, ("H", "G")))
    return to_dense(_end_at(SparseMDP(successors, probabilities, rewards, start, terminal)))


@partial(jax.jit, static_argnames="slippery")
def cliff_walking(*, slippery: bool = False) -> SparseMDP:
    """Gymnasium's CliffWalking-v1: from the bottom left corner of a 4x12 grid to the bottom right one.

    The cells between the two are a cliff: a step onto it gives -100 and leads back to the start, without an end of
    the episode. Every other step gives -1. Actions up, right, down, left. Source: Sutton & Barto 2018, example 6.6.

    Args:
        slippery: whether moves go to either side with probability 1/3 each.
    """
    rows, columns, first, goal = 4, 12, 36, 47
    successors = _with_sides(_neighbours(rows, columns, moves=_CLIFF_MOVES))
    falls = (successors > first) & (successors < goal)
    probabilities = _of_sides(_slipping(2 / 3 if slippery else 0.0), successors)
    states = jnp.eye(rows * columns)
    return _end_at(
        SparseMDP(
            successors=jnp.where(falls, first, successors),
            probabilities=probabilities,
            rewards=jnp.where(falls, -100.0, -1.0),
            start=states[first],
            terminal=states[goal] > 0,
        )
    )


@jax.jit
def taxi() -> SparseMDP:
    """Gymnasium's Taxi-v4 (Dietterich 2000): fetch a passenger at one of four stands and take him to another.

    -1 per step, -10 for picking up or dropping off where that is not possible, +20 and the end for arriving. State
    `((row * 5 + column) * 5 + passenger) * 4 + destination`, where passenger 4 is in the taxi. Actions down, up, right,
    left, pick up, drop off. States in which the passenger is at the destination are terminal.
    """
    states = [(r, c, p, d) for r in range(5) for c in range(5) for p in range(5) for d in range(4)]
    outcomes = [[_taxi_step(*state, action) for action in range(6)] for state in states]
    successors = np.array([[((r * 5 + c) * 5 + p) * 4 + d for (r, c, p, d), _ in row] for row in outcomes])
    waiting = np.array([p != d and p < 4 for _, _, p, d in states])
    return _end_at(
        SparseMDP(
            successors=jnp.asarray(successors[..., None], jnp.int32),
            probabilities=jnp.ones((len(states), 6, 1)),
            rewards=jnp.asarray([[[1.0 * reward] for _, reward in row] for row in outcomes]),
            start=jnp.asarray(waiting / waiting.sum()),
            terminal=jnp.asarray([p == d for _, _, p, d in states]),
        )
    )


@partial(jax.jit, static_argnames="length")
def random_walk(length: int = 19, *, left_reward: float = -1.0, right_reward: float = 1.0) -> SparseMDP:
    """Steps to the left or right with equal probability, from the middle to either end; there is one action.

    States 0 and `length + 1` are the ends, which give their reward. With 5 states and rewards 0 and 1 it is example 6.2
    of Sutton & Barto 2018, with 19 and rewards -1 and 1 that of section 7.1.

    Args:
        length: the number of states between the ends, odd.
        left_reward: on arrival at the left end.
        right_reward: on arrival at the right end.

    Raises:
        UserError: a length that is not odd and positive.
    """
    if length < 1 or length % 2 == 0:
        raise UserError(f"random_walk: length must be odd and positive, so that it has a middle, not {length!r}.")
    states = jnp.arange(length + 2)
    successors = jnp.clip(jnp.stack([states - 1, states + 1], -1), 0, length + 1)[:, None, :]
    at_end = jnp.where(successors == 0, left_reward, jnp.where(successors == length + 1, right_reward, 0.0))
    middle = 1.0 * (states == (length + 1) // 2)
    return _end_at(
        SparseMDP(successors, jnp.full(successors.shape, 0.5), at_end, middle, (states == 0) | (states == length + 1))
    )


@partial(jax.jit, static_argnames=("states", "actions"))
def random_mdp(key: Key, states: int = 5, actions: int = 3) -> MDP:
    """Rows of P uniform on the simplex, rewards standard normal, a uniform start; the last state is terminal.

    Args:
        key: the source of all randomness.
        states: at least 2, the terminal one included.
        actions: at least 1.

    Raises:
        UserError: too few states or actions.
    """
    if states < 2 or actions < 1:
        raise UserError(f"random_mdp needs at least 2 states and 1 action, not {states} and {actions}.")
    P_key, R_key = jax.random.split(key)
    weights = jax.random.exponential(P_key, (states, actions, states))
    R = jax.random.normal(R_key, (states, actions, states))
    terminal = jnp.arange(states) == states - 1
    P = weights / weights.sum(-1, keepdims=True)
    from_terminal = terminal[:, None, None]
    stay = jnp.eye(states, dtype=P.dtype)[:, None, :]
    start = jnp.where(terminal, 0.0, 1.0 / (states - 1))
    return MDP(jnp.where(from_terminal, stay, P), jnp.where(from_terminal, 0.0, R), start, terminal)


def _end_at(mdp: SparseMDP) -> SparseMDP:
    """The process with terminal states that lead to themselves with reward 0."""
    from_terminal = mdp.terminal[:, None, None]
    num_outcomes = mdp.successors.shape[-1]
    only = jnp.arange(num_outcomes) == 0
    return mdp._replace(
        successors=jnp.where(from_terminal, jnp.arange(len(mdp.terminal))[:, None, None], mdp.successors).astype(
            jnp.int32
        ),
        probabilities=jnp.where(from_terminal, only[None, None, :], mdp.probabilities),
        rewards=jnp.where(from_terminal, 0.0, mdp.rewards),
    )


def _neighbours(
    rows: int,
    columns: int,
    walls: Sequence[tuple[int, int]] = (),
    moves: Sequence[tuple[int, int]] = _MOVES,
) -> Array:
    """The cell that each move reaches, [S, 4] int32; a move into a wall or over the edge stays in place."""
    cells = np.arange(rows * columns)
    row, column = np.divmod(cells, columns)
    blocked = _is_wall(rows, columns, walls)
    reached = []
    for down, right in moves:
        to = np.clip(row + down, 0, rows - 1) * columns + np.clip(column + right, 0, columns - 1)
        reached.append(np.where(blocked[to], cells, to))
    return jnp.asarray(np.stack(reached, -1), jnp.int32)


def _is_wall(rows: int, columns: int, walls: Sequence[tuple[int, int]]) -> np.ndarray:
    """[S] bool; negative rows and columns count from the end."""
    return np.isin(np.arange(rows * columns), [(r % rows) * columns + c % columns for r, c in walls])


def _with_sides(neighbours: Array) -> Array:
    """The outcomes of slippery moves, [S, 4, 3]: ahead, and to either side."""
    return jnp.stack([neighbours, jnp.roll(neighbours, 1, axis=1), jnp.roll(neighbours, -1, axis=1)], -1)


def _slipping(slip: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """The probabilities of the three outcomes of `_with_sides`."""
    return 1 - slip, slip / 2, slip / 2


def _of_sides(slipping: Sequence[Scalar], successors: Array) -> Array:
    """The probabilities of `_slipping` for all outcomes, in the shape of `successors`."""
    return jnp.broadcast_to(jnp.stack([jnp.asarray(p) for p in slipping]), successors.shape)


def _at(cell: Cell, rows: int, columns: int) -> Array:
    """[S] bool, true at a cell."""
    row, column = (jnp.asarray(place) % size for place, size in zip(cell, (rows, columns), strict=True))
    return jnp.arange(rows * columns) == row * columns + column


def _check_grid(
    rows: int, columns: int, slip: Scalar, walls: Sequence[tuple[int, int]], special: Sequence[Cell]
) -> None:
    """Refuse grids that make no sense; what is traced cannot be looked at."""
    if rows < 2 or columns < 2 or (not is_traced(slip) and not 0 <= slip <= 1):
        raise UserError(f"grid_world needs rows, columns >= 2 and slip in [0, 1], not {rows}, {columns}, {slip}.")
    taken: dict[tuple[int, int], str] = {}
    named = [("goal", special[0]), ("trap", special[1]), ("start", special[2]), *(("walls", cell) for cell in walls)]
    for name, cell in named:
        if any(map(is_traced, cell)):
            continue
        row, column = (int(np.asarray(place)) for place in cell)
        if not (-rows <= row < rows and -columns <= column < columns):
            raise UserError(f"grid_world: {name} ({row}, {column}) is outside of the {rows} x {columns} grid.")
        other = taken.setdefault((row % rows, column % columns), name)
        if other != name:
            raise UserError(f"grid_world: {name} and {other} are both in the cell ({row % rows}, {column % columns}).")


def _taxi_step(
    row: int, column: int, passenger: int, destination: int, action: int
) -> tuple[tuple[int, int, int, int], int]:
    """The successor and the reward of an action in Taxi."""
    stand = _TAXI_STANDS.index((row, column)) if (row, column) in _TAXI_STANDS else None
    if action == 4:  # pick up
        picked = passenger < 4 and passenger == stand
        return (row, column, 4 if picked else passenger, destination), -1 if picked else -10
    if action == 5:  # drop off
        dropped = passenger == 4 and stand is not None
        arrived = dropped and stand == destination
        left_at = passenger if stand is None or not dropped else stand
        return (row, column, left_at, destination), 20 if arrived else -1 if dropped else -10
    down, right = ((1, 0), (-1, 0), (0, 1), (0, -1))[action]
    between = 2 * column + right  # the place in the map between the two cells
    wall = right != 0 and 0 <= between < len(_TAXI_MAP[row]) and _TAXI_MAP[row][between] == "|"
    to_row, to_column = min(max(row + down, 0), 4), min(max(column + right, 0), 4)
    return (to_row, column if wall else to_column, passenger, destination), -1


def grid_of(name: str, settings: Mapping[str, Any]) -> Grid | None:
    """How a world of MDPS with these settings lies on a grid, None if it does not."""
    match name:
        case "grid_world":
            rows, columns = settings.get("rows", 8), settings.get("columns", 8)
            labels = {(row % rows, column % columns): "" for row, column in settings.get("walls", ())}
            for end, place, label in (("goal", (0, -1), "+1"), ("trap", (1, -1), "−1")):
                row, column = settings.get(end, place)
                labels[row % rows, column % columns] = label
            return Grid(rows, columns, labels)
        case "frozen_lake":
            lake = _LAKES[settings.get("size", 4)].split()
            cells = [(r, c, tile) for r, row in enumerate(lake) for c, tile in enumerate(row)]
            labels = {(r, c): {"H": "hole", "G": "goal"}[tile] for r, c, tile in cells if tile in "HG"}
            return Grid(len(lake), len(lake), labels)
        case "cliff_walking":
            return Grid(4, 12, {(3, column): "" for column in range(1, 11)} | {(3, 11): "goal"}, _CLIFF_MOVES)
        case _:
            return None


MDPS: dict[str, Callable[..., AnyMDP]] = {
    "grid_world": grid_world,
    "frozen_lake": frozen_lake,
    "cliff_walking": cliff_walking,
    "taxi": taxi,
    "random_walk": random_walk,
}
"""Worlds by name; their arguments are the settings of the environment."""

"""Finite Markov decision processes whose P and R are known: exact answers for tests, and small environments.

Notation of Sutton & Barto, "Reinforcement Learning" (2018), chapters 3 and 4. `S` states, `A` actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxpg.errors import UserError
from jaxpg.types import Array, Box, Discrete, Env, Key, TimeStep

# Left, down, right, up, as in FrozenLake: the neighbours of an action in this cyclic order are perpendicular to it.
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_LAKES = {
    4: "SFFF FHFH FFFH HFFG",
    8: "SFFFFFFF FFFFFFFF FFFHFFFF FFFFFHFF FFFHFFFF FHHFFFHF FHFFHFHF FFFHFFFG",
}


class MDP(NamedTuple):
    """A finite Markov decision process.

    P: [S, A, S], P[s, a, s'] = p(s' | s, a).
    R: [S, A, S], the reward of the transition; expected rewards r(s, a) are `(P * R).sum(-1)`.
    start: [S], the distribution of the first state.
    terminal: [S] bool. Entering such a state ends the episode; it has no rewards.
    """

    P: Array
    R: Array
    start: Array
    terminal: Array


class TabularState(NamedTuple):
    """State of a tabular environment: `position` [] int, the state of the MDP; `time` [] int, steps since the reset."""

    position: Array
    time: Array


def grid_world(
    rows: int = 8,
    columns: int = 8,
    *,
    living_cost: float = 0.04,
    slip: float = 0.2,
    walls: Sequence[tuple[int, int]] = (),
) -> MDP:
    """The textbook's grid: +1 in the top right corner, -1 in the cell below it, start in the bottom left corner.

    A move into a wall or over the edge stays in place. `grid_world(3, 4, walls=[(1, 1)])` is the 4x3 world of Russell
    & Norvig, "Artificial Intelligence: A Modern Approach" (4th ed.), section 17.1. State `row * columns + column`,
    counted from the top left; actions left, down, right, up.

    Args:
        rows: at least 2.
        columns: at least 2.
        living_cost: subtracted from the reward of every step.
        slip: probability that a move goes to the side, half of it to either side.
        walls: cells (row, column) that cannot be entered.

    Raises:
        UserError: a grid that is too small, or a slip that is not a probability.
    """
    if rows < 2 or columns < 2 or not 0 <= slip <= 1:
        raise UserError(f"grid_world needs rows, columns >= 2 and slip in [0, 1], not {rows}, {columns}, {slip}.")
    rewards = np.zeros((rows, columns))
    rewards[0, -1], rewards[1, -1] = 1.0, -1.0
    terminal = rewards.ravel() != 0
    P = _moves_on_grid(rows, columns, slip, walls)
    R = np.broadcast_to(rewards.ravel() - living_cost, P.shape)
    start = np.eye(rows * columns)[(rows - 1) * columns]
    return _absorbing(P, R, start, terminal)


def frozen_lake(size: int = 4, *, slippery: bool = True) -> MDP:
    """Gymnasium's FrozenLake-v1: reach the goal (reward 1) over ice with holes (reward 0, the end).

    On slippery ice each of the intended direction and its two perpendiculars has probability 1/3.

    Args:
        size: 4 or 8, the two standard maps of Gymnasium.
        slippery: whether moves can go to the side.

    Raises:
        UserError: any other size.
    """
    if size not in _LAKES:
        raise UserError(f"frozen_lake: size must be 4 or 8, not {size!r}.")
    tiles = np.array([list(row) for row in _LAKES[size].split()]).ravel()
    P = _moves_on_grid(size, size, slip=2 / 3 if slippery else 0.0)
    R = np.broadcast_to(1.0 * (tiles == "G"), P.shape)
    return _absorbing(P, R, np.eye(size * size)[0], np.isin(tiles, ("H", "G")))


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
    return _absorbing(P, R, jnp.where(terminal, 0.0, 1.0 / (states - 1)), terminal)


def as_env(mdp: MDP, time_limit: int, name: str) -> Env:
    """The environment that samples an MDP; observations are one-hot, `[S]` float32, the state is a TabularState.

    Args:
        mdp: the process to sample.
        time_limit: episodes time out after this many steps, at least 1.
        name: of the environment.

    Raises:
        UserError: a time limit below 1.
    """
    if time_limit < 1:
        raise UserError(f"{name}: time_limit must be at least 1, not {time_limit!r}.")
    num_states, num_actions, _ = mdp.P.shape
    P_cdf, start_cdf = _cdf(mdp.P), _cdf(mdp.start)

    def observe(position: Array) -> Array:
        return jax.nn.one_hot(position, num_states, dtype=jnp.float32)

    def reset(key: Key) -> tuple[TabularState, Array]:
        position = _draw(key, start_cdf)
        return TabularState(position, jnp.zeros((), jnp.int32)), observe(position)

    def step(key: Key, state: TabularState, action: Array) -> tuple[TabularState, TimeStep]:
        position, time = _draw(key, P_cdf[state.position, action]), state.time + 1
        terminated = mdp.terminal[position]
        return TabularState(position, time), TimeStep(
            obs=observe(position),
            reward=mdp.R[state.position, action, position].astype(jnp.float32),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (time >= time_limit),
        )

    space = Box(np.zeros(num_states, np.float32), np.ones(num_states, np.float32))
    return Env(name, reset, step, space, Discrete(num_actions), time_limit, min_truncation_step=time_limit)


@partial(jax.jit, static_argnames="horizon")
def state_values(mdp: MDP, policy: Array, gamma: Array | float, horizon: int | None = None) -> Array:
    """The exact state values of a policy, differentiable in the policy and in gamma.

    Without a horizon v = (I - gamma P_pi)^-1 r_pi by a linear solve, where P_pi keeps only transitions into
    non-terminal states; with gamma 1 the policy must reach a terminal state from everywhere. With a horizon
    v_0 = 0, v_{k+1} = r_pi + gamma P_pi v_k: the expected return of the next `horizon` steps, without a bootstrap.

    Args:
        mdp: the process.
        policy: [S, A], pi(a | s).
        gamma: discount factor.
        horizon: number of steps, or None for all.

    Returns:
        [S], 0 in terminal states.
    """
    P_pi, r_pi = _induced_chain(mdp, policy)
    if horizon is None:
        return jnp.linalg.solve(jnp.eye(len(r_pi)) - gamma * P_pi, r_pi)
    v, _ = lax.scan(lambda v, _: (r_pi + gamma * P_pi @ v, None), jnp.zeros_like(r_pi), length=horizon)
    return v


@jax.jit
def action_values(mdp: MDP, values: Array, gamma: Array | float) -> Array:
    """q(s, a) = sum_s' p(s' | s, a) (r(s, a, s') + gamma v(s')), with v 0 in terminal states; `[S, A]`."""
    next_values = jnp.where(mdp.terminal, 0.0, values)
    return (mdp.P * (mdp.R + gamma * next_values[None, None, :])).sum(-1)


def expected_return(mdp: MDP, policy: Array, gamma: Array | float, horizon: int | None = None) -> Array:
    """The exact objective, J = sum_s start(s) v_pi(s); arguments as in `state_values`."""
    return mdp.start @ state_values(mdp, policy, gamma, horizon)


@jax.jit
def state_visits(mdp: MDP, policy: Array, gamma: Array | float) -> Array:
    """Expected discounted number of visits to each state during an episode, `[S]`.

    eta = (I - gamma P_pi^T)^-1 start, 0 in terminal states. The policy gradient theorem (Sutton & Barto, section 13.2)
    reads grad J = sum_s eta(s) sum_a q(s, a) grad pi(a | s), with gamma in both. Practice weights states by the visits
    with gamma 1 and keeps gamma in q alone.
    """
    P_pi, _ = _induced_chain(mdp, policy)
    return jnp.linalg.solve(jnp.eye(len(P_pi)) - gamma * P_pi.T, jnp.where(mdp.terminal, 0.0, mdp.start))


def _induced_chain(mdp: MDP, policy: Array) -> tuple[Array, Array]:
    """Transitions between non-terminal states and expected rewards under a policy, [S, S] and [S]."""
    policy = jnp.where(mdp.terminal[:, None], 0.0, policy)
    P_pi = jnp.einsum("sa,sax->sx", policy, mdp.P)
    r_pi = jnp.einsum("sa,sax,sax->s", policy, mdp.P, mdp.R)
    return jnp.where(mdp.terminal[None, :], 0.0, P_pi), r_pi


def _moves_on_grid(rows: int, columns: int, slip: float, walls: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """Transition probabilities of moves on a grid, [S, 4, S]."""
    cells = np.arange(rows * columns)
    row, column = np.divmod(cells, columns)
    reached = np.zeros((4, rows * columns, rows * columns))
    for move, (down, right) in enumerate(_MOVES):
        to = np.clip(row + down, 0, rows - 1) * columns + np.clip(column + right, 0, columns - 1)
        blocked = np.isin(to, [r * columns + c for r, c in walls])
        reached[move, cells, np.where(blocked, cells, to)] = 1.0
    sideways = (np.roll(reached, 1, axis=0) + np.roll(reached, -1, axis=0)) / 2
    return ((1 - slip) * reached + slip * sideways).transpose(1, 0, 2)


@jax.jit
def _absorbing(P: ArrayLike, R: ArrayLike, start: ArrayLike, terminal: ArrayLike) -> MDP:
    """The MDP with terminal states that lead to themselves with reward 0, so that P is a distribution everywhere."""
    P, R, start, terminal = (jnp.asarray(x) for x in (P, R, start, terminal))
    from_terminal = terminal[:, None, None]
    stay = jnp.eye(len(P), dtype=P.dtype)[:, None, :]
    return MDP(jnp.where(from_terminal, stay, P), jnp.where(from_terminal, 0.0, R), start, terminal)


@jax.jit
def _cdf(p: Array) -> Array:
    """Cumulative probabilities for `_draw`.

    Whatever the rounding, the last possible outcome has exactly 1, and impossible ones have 0, so they are never drawn.
    """
    remaining = jnp.flip(jnp.cumsum(jnp.flip(p, -1), -1), -1) - p
    return jnp.where(p > 0, jnp.where(remaining > 0, jnp.cumsum(p, -1), 1.0), 0.0)


def _draw(key: Key, cdf: Array) -> Array:
    """An index whose probability is not 0: the first whose cumulative probability exceeds a uniform number."""
    return jnp.argmax(jax.random.uniform(key) < cdf).astype(jnp.int32)

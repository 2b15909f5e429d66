"""Prediction: the values of a policy from the episodes that it plays, without knowing P and R, in a table.

Every method takes experience and returns the values after each episode, `[E, S]`, so that a learning curve is its
error against `envs.state_values`, and many runs are a `vmap` over keys. Between Monte Carlo, which waits for the return
of an episode, and TD(0), which bootstraps from the next state, lie n-step TD and TD(lambda). On-line methods change the
table after every step, off-line ones at the end of the episode.

Source: Sutton & Barto 2018, chapters 5, 6, 7 and 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.mdp_records import AnyMDP, check_arguments, is_traced
from jaxpg.envs.tabular import TabularState, as_env
from jaxpg.errors import UserError, check_record, checked_by
from jaxpg.objectives.returns import discounted_returns, n_step_targets
from jaxpg.types import Array, Key, Scalar
from jaxpg.user_input.domains import check_whole


class TabularEpisodes(NamedTuple):
    """E episodes of up to T steps, `[T, E]`.

    state, next_state: int32, before and after the step.
    reward: float.
    discount: 0 where the step terminated the episode, else 1.
    last: bool, whether the episode ended, by termination or time-out.
    mask: 1 where the step is real, 0 after the end of the episode.
    """

    state: Array
    next_state: Array
    reward: Array
    discount: Array
    last: Array
    mask: Array


@checked_by(check_arguments)
@partial(jax.jit, static_argnames=("num_episodes", "time_limit"))
def sample_episodes(mdp: AnyMDP, policy: Array, key: Key, *, num_episodes: int, time_limit: int) -> TabularEpisodes:
    """Episodes of a policy `[S, A]`, each of `time_limit` steps at most.

    Raises:
        UserError: what is no MDP, rows of P or of the policy that are no distributions, and a time limit below 1.
    """
    env = as_env(mdp, time_limit, "mdp")
    logits = jnp.log(policy)

    def step(state: TabularState, key: Key) -> tuple[TabularState, TabularEpisodes]:
        action_key, step_key = jax.random.split(key)
        action = jax.random.categorical(action_key, logits[state.position])
        after, timestep = env.step(step_key, state, action)
        positions = state.position, after.position
        return after, TabularEpisodes(*positions, timestep.reward, timestep.discount, timestep.last, jnp.ones(()))

    def episode(key: Key) -> TabularEpisodes:
        reset_key, step_key = jax.random.split(key)
        _, steps = lax.scan(step, env.reset(reset_key)[0], jax.random.split(step_key, time_limit))
        ended_before = jnp.cumsum(steps.last) - steps.last > 0
        return steps._replace(mask=1.0 - ended_before)

    return jax.vmap(episode, out_axes=1)(jax.random.split(key, num_episodes))


def _check_method(method: str, given: Mapping[str, Any]) -> None:
    """Refuse episodes that are none, and a table of other states than theirs."""
    check_record(method, given["episodes"], TabularEpisodes, "values.sample_episodes(mdp, policy, ...)")
    _check_table(given["episodes"], jnp.asarray(given["values"]))


def _check_table(episodes: TabularEpisodes, values: Array) -> None:
    """Raise a UserError for a table without one of the states visited: JAX would take its last entry in their place.

    Episodes that are traced pass: their states are not known.
    """
    if values.ndim != 1:
        raise UserError(f"The values to begin with are a table [S], not an array of the shape {list(values.shape)}.")
    states = episodes.state, episodes.next_state
    if any(map(is_traced, states)):
        return
    largest = max((int(np.max(x)) for x in states if np.size(x)), default=-1)
    if largest >= len(values):
        raise UserError(
            f"The episodes come to state {largest}, and the values to begin with are of {len(values)} states: give all "
            "states of the MDP a value, the terminal ones 0, as jnp.zeros(len(mdp.terminal)) does."
        )


@checked_by(_check_method)
@partial(jax.jit, static_argnames="first_visit")
def monte_carlo(episodes: TabularEpisodes, values: Array, gamma: Scalar, *, first_visit: bool = True) -> Array:
    """v(s) = the mean of the returns that followed visits to s, after each episode: `[E, S]`.

    Source: Sutton & Barto 2018, section 5.1; Singh & Sutton 1996 for the bias of every-visit.

    Args:
        episodes: that end; the return of one that timed out has no bootstrap.
        values: [S], of states that have not been visited.
        gamma: discount factor.
        first_visit: only the first visit of an episode counts, which is unbiased; otherwise every visit.

    Raises:
        UserError: `values` has no entry for a state visited.
    """
    zeros, values = jnp.zeros_like(episodes.reward), _as_float(values)
    returns = discounted_returns(episodes.reward, episodes.discount, episodes.last, zeros, gamma)

    def sums(state: Array, returns: Array, mask: Array) -> tuple[Array, Array]:
        visits = jax.nn.one_hot(state, len(values)) * mask[:, None]
        if first_visit:
            visits *= jnp.cumsum(visits, axis=0) == 1
        return visits.T @ returns, visits.sum(0)

    total, count = jax.vmap(sums, in_axes=1)(episodes.state, returns, episodes.mask)
    total, count = jnp.cumsum(total, axis=0), jnp.cumsum(count, axis=0)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), values)


@checked_by(_check_method)
@partial(jax.jit, static_argnames="online")
def td_lambda(
    episodes: TabularEpisodes,
    values: Array,
    gamma: Scalar,
    *,
    step_size: Scalar,
    lambda_: Scalar = 0.0,
    online: bool = True,
) -> Array:
    """v <- v + alpha delta_t e_t with traces e_t = gamma lambda e_{t-1} + 1[s_t], after each episode: `[E, S]`.

    delta_t = r_t + gamma discount_t v(s_{t+1}) - v(s_t). TD(0) at lambda 0; off-line, lambda 1 is every-visit Monte
    Carlo with a constant step size, and every lambda moves towards its lambda-returns.
    Source: Sutton & Barto 2018, sections 6.1 and 12.2 (accumulating traces).

    Args:
        episodes: learned from one after the other.
        values: [S], to begin with, 0 in terminal states.
        gamma: discount factor.
        step_size: alpha.
        lambda_: decay of the traces, between 0 and 1.
        online: change the values after every step; otherwise by the sum of the changes at the end of an episode.

    Raises:
        UserError: `values` has no entry for a state visited.
    """
    values = _as_float(values)

    def step(carry: tuple[Array, Array, Array], x: TabularEpisodes) -> tuple[tuple[Array, Array, Array], None]:
        values, trace, changes = carry
        current = values + changes if online else values
        delta = x.reward + gamma * x.discount * current[x.next_state] - current[x.state]
        trace = (gamma * lambda_ * trace).at[x.state].add(1.0)
        return (values, trace, changes + step_size * x.mask * delta * trace), None

    def episode(values: Array, x: TabularEpisodes) -> tuple[Array, Array]:
        zeros = jnp.zeros_like(values)
        (_, _, changes), _ = lax.scan(step, (values, zeros, zeros), x)
        return values + changes, values + changes

    return lax.scan(episode, values, _by_episode(episodes))[1]


@checked_by(_check_method)
@partial(jax.jit, static_argnames=("n", "online"))
def n_step_td(
    episodes: TabularEpisodes, values: Array, gamma: Scalar, *, step_size: Scalar, n: int, online: bool = True
) -> Array:
    """v(s_t) <- v(s_t) + alpha (G_t - v(s_t)), with n rewards and then v of the state reached, after each episode.

    Source: Sutton & Barto 2018, section 7.1.

    Args:
        episodes: learned from one after the other.
        values: [S], to begin with, 0 in terminal states.
        gamma: discount factor.
        step_size: alpha.
        n: rewards per target, at least 1; as many as an episode has give Monte Carlo.
        online: a target is made from the newest values, n steps after its state; otherwise from those before the
            episode.

    Returns:
        [E, S].

    Raises:
        UserError: `n` is no whole number from 1 on, or `values` has no entry for a state visited.
    """
    n = check_whole("n, the rewards of a target,", n)
    values = _as_float(values)

    def episode(values: Array, x: TabularEpisodes) -> tuple[Array, Array]:
        rewards, factor = _target_parts(x, gamma, n)
        reached = _state_after(x, n)

        def update(current: Array, t: Array) -> tuple[Array, None]:
            source = current if online else values
            error = rewards[t] + factor[t] * source[reached[t]] - source[x.state[t]]
            return current.at[x.state[t]].add(step_size * x.mask[t] * error), None

        after, _ = lax.scan(update, values, jnp.arange(len(x.reward)))
        return after, after

    return lax.scan(episode, values, _by_episode(episodes))[1]


def _as_float(values: Array) -> Array:
    """Values to begin with, which a user may give as integers or as a list."""
    values = jnp.asarray(values)
    return values.astype(jnp.result_type(values, jnp.float32))


class PredictionError(NamedTuple):
    """Errors of estimates over runs, each `[E]`: mean over states of the square, then the root. rmse² = bias² + sd²."""

    bias: Array
    sd: Array
    rmse: Array


def prediction_error(values: Array, exact: Array, states: Array) -> PredictionError:
    """Bias, standard deviation and root mean squared error of estimated values.

    Args:
        values: [N, E, S], of N runs after each of E episodes.
        exact: [S], the true values.
        states: [S] bool, those that count: all but the terminal ones.
    """

    def root_mean(squares: Array) -> Array:
        return jnp.sqrt(squares @ states / states.sum())

    error = values - exact[None, None, :]
    return PredictionError(
        bias=root_mean(error.mean(0) ** 2), sd=root_mean(error.var(0)), rmse=root_mean((error**2).mean(0))
    )


def _by_episode(episodes: TabularEpisodes) -> TabularEpisodes:
    """`[E, T]`, for a scan over episodes."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), episodes)


def _target_parts(x: TabularEpisodes, gamma: Scalar, n: int) -> tuple[Array, Array]:
    """[T] each: an n-step target is linear in the value of the state reached, rewards + factor * v."""

    def target(reward: Array, v_t: Array) -> Array:
        reward, discount, last, v_t = (y[:, None] for y in (reward, x.discount, x.last, v_t))
        return n_step_targets(reward, discount, last, v_t, gamma, n)[:, 0]

    zeros = jnp.zeros_like(x.reward)
    return target(x.reward, zeros), target(zeros, jnp.ones_like(zeros))


def _state_after(x: TabularEpisodes, n: int) -> Array:
    """[T], the state n steps on from each step of an episode, or that in which the episode ends before."""

    def one_step_further(_: int, reached: Array) -> Array:
        following = jnp.concatenate([reached[1:], x.next_state[-1:]])
        return jnp.where(x.last, x.next_state, following)

    return lax.fori_loop(1, min(n, len(x.state)), one_step_further, x.next_state)

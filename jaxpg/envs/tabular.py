"""Finite Markov decision processes whose P and R are known: exact values of policies, and sampling.

Notation of Sutton & Barto, "Reinforcement Learning" (2018), chapters 3 and 4. `S` states, `A` actions. mdps.py has
worlds to begin with, values/planning.py finds their optimal policies.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpg.envs.mdp_records import (
    MDP,
    AnyMDP,
    SparseMDP,
    check_arguments,
    check_policy,
    check_probabilities,
    num_states_and_actions,
)
from jaxpg.errors import UserError, checked_by
from jaxpg.types import Array, Box, Discrete, Env, Key, TimeStep


class TabularState(NamedTuple):
    """State of a tabular environment: `position` [] int, the state of the MDP; `time` [] int, steps since the reset."""

    position: Array
    time: Array


def as_env(mdp: AnyMDP, time_limit: int, name: str) -> Env:
    """The environment that samples an MDP; observations are one-hot, `[S]` float32, the state is a TabularState.

    Args:
        mdp: the process to sample.
        time_limit: episodes time out after this many steps, at least 1.
        name: of the environment.

    Raises:
        UserError: a time limit below 1, or what `num_states_and_actions` and `check_probabilities` refuse.
    """
    if time_limit < 1:
        raise UserError(f"{name}: time_limit must be at least 1, not {time_limit!r}.")
    num_states, num_actions = num_states_and_actions(mdp)
    check_probabilities(mdp)
    mdp = jax.tree.map(jnp.asarray, mdp)  # arrays of NumPy cannot be indexed by traced positions
    probabilities = mdp.probabilities if isinstance(mdp, SparseMDP) else mdp.P
    outcome_cdf, start_cdf = _cdf(probabilities), _cdf(mdp.start)

    def observe(position: Array) -> Array:
        return jax.nn.one_hot(position, num_states, dtype=jnp.float32)

    def reset(key: Key) -> tuple[TabularState, Array]:
        position = _draw(key, start_cdf)
        return TabularState(position, jnp.zeros((), jnp.int32)), observe(position)

    def step(key: Key, state: TabularState, action: Array) -> tuple[TabularState, TimeStep]:
        outcome, time = _draw(key, outcome_cdf[state.position, action]), state.time + 1
        position, reward = _outcome(mdp, state.position, action, outcome)
        terminated = mdp.terminal[position]
        return TabularState(position, time), TimeStep(
            obs=observe(position),
            reward=reward.astype(jnp.float32),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (time >= time_limit),
        )

    space = Box(np.zeros(num_states, np.float32), np.ones(num_states, np.float32))
    return Env(name, reset, step, space, Discrete(num_actions), time_limit, min_truncation_step=time_limit)


@jax.jit
def to_dense(mdp: SparseMDP) -> MDP:
    """The same process with all pairs of states, `[S, A, S]`.

    Where several outcomes of an action lead to the same state, R is their expected reward, so values are the same.
    """
    num_states, num_actions = num_states_and_actions(mdp)
    s, a = jnp.arange(num_states)[:, None, None], jnp.arange(num_actions)[None, :, None]
    zeros = jnp.zeros((num_states, num_actions, num_states), jnp.result_type(mdp.probabilities, float))
    P = zeros.at[s, a, mdp.successors].add(mdp.probabilities)
    gain = zeros.at[s, a, mdp.successors].add(mdp.probabilities * mdp.rewards)
    return MDP(P, jnp.where(P > 0, gain / jnp.where(P > 0, P, 1.0), 0.0), mdp.start, mdp.terminal)


def to_sparse(mdp: MDP) -> SparseMDP:
    """The same process with the outcomes that can happen; K is the largest number of them. Not under `jit`."""
    P = np.asarray(mdp.P)
    most = int((P > 0).sum(-1).max())
    successors = np.argsort(P <= 0, axis=-1, kind="stable")[..., :most].astype(np.int32)
    probabilities = np.take_along_axis(P, successors, -1)
    rewards = np.where(probabilities > 0, np.take_along_axis(np.asarray(mdp.R), successors, -1), 0.0)
    outcomes = jnp.asarray(successors), jnp.asarray(probabilities), jnp.asarray(rewards)
    return SparseMDP(*outcomes, start=mdp.start, terminal=mdp.terminal)


@checked_by(check_arguments)
@partial(jax.jit, static_argnames="horizon")
def state_values(mdp: AnyMDP, policy: Array, gamma: Array | float, horizon: int | None = None) -> Array:
    """The exact state values of a policy, differentiable in the policy and in gamma.

    Without a horizon v = (I - gamma P_pi)^-1 r_pi by a linear solve, where P_pi `[S, S]` keeps only transitions into
    non-terminal states; with gamma 1 the policy must reach a terminal state from everywhere. Where `[S, S]` is too
    large there is `values.policy_evaluation`. With a horizon v_0 = 0, v_{k+1} = r_pi + gamma P_pi v_k: the expected
    return of the next `horizon` steps, without a bootstrap.

    Args:
        mdp: the process.
        policy: [S, A], pi(a | s).
        gamma: discount factor.
        horizon: number of steps, or None for all.

    Returns:
        [S], 0 in terminal states.

    Raises:
        UserError: what is no MDP, and rows of P or of the policy that are no distributions.
    """
    check_policy(mdp, policy)
    policy = jnp.where(mdp.terminal[:, None], 0.0, policy)
    r_pi = (policy * expected_rewards(mdp)).sum(-1)

    def discounted(v: Array) -> Array:
        return gamma * (policy * expected_next_values(mdp, v)).sum(-1)

    if horizon is not None:
        return lax.scan(lambda v, _: (r_pi + discounted(v), None), jnp.zeros_like(r_pi), length=horizon)[0]
    return jnp.linalg.solve(jnp.eye(len(r_pi)) - gamma * _induced_chain(mdp, policy), r_pi)


@jax.jit
def action_values(mdp: AnyMDP, values: Array, gamma: Array | float) -> Array:
    """q(s, a) = sum_s' p(s' | s, a) (r(s, a, s') + gamma v(s')), with v 0 in terminal states; `[S, A]`."""
    return expected_rewards(mdp) + gamma * expected_next_values(mdp, values)


def expected_rewards(mdp: AnyMDP) -> Array:
    """r(s, a) = sum_s' p(s' | s, a) r(s, a, s'), `[S, A]`."""
    num_states_and_actions(mdp)  # refuses other shapes
    p, r = (mdp.probabilities, mdp.rewards) if isinstance(mdp, SparseMDP) else (mdp.P, mdp.R)
    return jnp.asarray((p * r).sum(-1), jnp.result_type(p, r, float))  # all may be integers


def expected_next_values(mdp: AnyMDP, values: Array, s: Array | slice = slice(None)) -> Array:
    """sum_s' p(s' | s, a) v(s') with v 0 in terminal states, for the states `s`: `[S, A]`, or `[A]` for one state."""
    values = jnp.where(mdp.terminal, 0.0, values)
    if isinstance(mdp, SparseMDP):
        return (mdp.probabilities[s] * values[mdp.successors[s]]).sum(-1)
    return mdp.P[s] @ values


def expected_return(mdp: AnyMDP, policy: Array, gamma: Array | float, horizon: int | None = None) -> Array:
    """The exact objective, J = sum_s start(s) v_pi(s); arguments and errors as in `state_values`."""
    values = state_values(mdp, policy, gamma, horizon)
    return mdp.start @ values


@jax.jit
def state_visits(mdp: AnyMDP, policy: Array, gamma: Array | float) -> Array:
    """Expected discounted number of visits to each state during an episode, `[S]`.

    eta = (I - gamma P_pi^T)^-1 start, 0 in terminal states. The policy gradient theorem (Sutton & Barto, section 13.2)
    reads grad J = sum_s eta(s) sum_a q(s, a) grad pi(a | s), with gamma in both. Practice weights states by the visits
    with gamma 1 and keeps gamma in q alone.
    """
    P_pi = _induced_chain(mdp, policy)
    return jnp.linalg.solve(jnp.eye(len(P_pi)) - gamma * P_pi.T, jnp.where(mdp.terminal, 0.0, mdp.start))


def _induced_chain(mdp: AnyMDP, policy: Array) -> Array:
    """Transitions between non-terminal states under a policy, [S, S]."""
    policy = jnp.where(mdp.terminal[:, None], 0.0, policy)
    if isinstance(mdp, SparseMDP):
        zeros = jnp.zeros((len(policy), len(policy)), jnp.result_type(policy, mdp.probabilities))
        s = jnp.arange(len(policy))[:, None, None]
        P_pi = zeros.at[s, mdp.successors].add(policy[..., None] * mdp.probabilities)
    else:
        P_pi = jnp.einsum("sa,sax->sx", policy, mdp.P)
    return jnp.where(mdp.terminal[None, :], 0.0, P_pi)


def _outcome(mdp: AnyMDP, state: Array, action: Array, outcome: Array) -> tuple[Array, Array]:
    """The successor and the reward of an outcome: a place in the last axis of the process."""
    if isinstance(mdp, SparseMDP):
        return mdp.successors[state, action, outcome], mdp.rewards[state, action, outcome]
    return outcome, mdp.R[state, action, outcome]


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

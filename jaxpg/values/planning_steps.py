"""Policy iteration and value iteration step by step, for pictures: every sweep's values and policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.tabular import AnyMDP, expected_rewards, num_states_and_actions
from jaxpg.types import Array, Scalar
from jaxpg.values.planning import (
    evaluation_backup,
    greedy_policy,
    optimality_backup,
    smallest_change,
    synchronous,
)


class Step(NamedTuple):
    """A step of a method, for a picture.

    kind: "start", "evaluation" (a sweep), "improvement" (of the policy), or "sweep" (of value iteration).
    values: [S].
    policy: [S, A].
    """

    kind: str
    values: Array
    policy: Array


def value_iteration_steps(mdp: AnyMDP, gamma: Scalar, *, tolerance: Scalar = 1e-6) -> Iterator[Step]:
    """The sweeps of `value_iteration` one after the other, each with the greedy policy of its values."""
    num_states, num_actions = num_states_and_actions(mdp)
    rewards = expected_rewards(mdp)
    values, change = jnp.zeros(num_states, rewards.dtype), jnp.asarray(jnp.inf)
    yield Step("start", values, jnp.full((num_states, num_actions), 1 / num_actions))
    while change > smallest_change(values, gamma, tolerance):
        values, change = _one_sweep(mdp, rewards, None, values, gamma)
        yield Step("sweep", values, greedy_policy(mdp, values, gamma, tolerance=tolerance))


def policy_iteration_steps(mdp: AnyMDP, gamma: Scalar, *, tolerance: Scalar = 1e-6) -> Iterator[Step]:
    """The sweeps of every evaluation and the improvements of `policy_iteration`, one after the other."""
    num_states, num_actions = num_states_and_actions(mdp)
    rewards = expected_rewards(mdp)
    values, policy = jnp.zeros(num_states, rewards.dtype), jnp.full((num_states, num_actions), 1 / num_actions)
    yield Step("start", values, policy)
    rise = jnp.asarray(jnp.inf)
    while rise > smallest_change(values, gamma, tolerance):
        before, change = values, jnp.asarray(jnp.inf)
        while change > smallest_change(values, gamma, tolerance):
            values, change = _one_sweep(mdp, rewards, policy, values, gamma)
            yield Step("evaluation", values, policy)
        rise = jnp.abs(values - before).max()
        policy = greedy_policy(mdp, values, gamma, tolerance=tolerance)
        yield Step("improvement", values, policy)


@jax.jit
def _one_sweep(mdp: AnyMDP, rewards: Array, policy: Array | None, values: Array, gamma: Scalar) -> tuple[Array, Array]:
    """The values after a synchronous sweep, and the largest change; it improves where there is no policy."""
    if policy is None:
        backup = optimality_backup(mdp, rewards, gamma)
    else:
        backup = evaluation_backup(mdp, rewards, policy, gamma)
    after = synchronous(backup, values)
    return after, jnp.abs(after - values).max()

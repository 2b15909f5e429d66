"""Policy iteration and value iteration step by step, for pictures: every sweep's values and policy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.mdp_records import AnyMDP
from jaxpg.envs.tabular import action_values, expected_rewards
from jaxpg.types import Array, Scalar
from jaxpg.values.planning import (
    MAX_SWEEPS,
    Swept,
    below_optimum,
    evaluation_backup,
    greedy_policy,
    optimality_backup,
    resting_values,
    smallest_change,
    sweep_until_converged,
    synchronous,
    uniform_policy,
    unless_as_good,
)


class Step(NamedTuple):
    """A step of a method, for a picture.

    kind: "start", "evaluation" (a sweep), "improvement" (of the policy), or "sweep" (of value iteration).
    values: [S].
    policy: [S, A].
    sweeps: until then, those of this step included.
    """

    kind: str
    values: Array
    policy: Array
    sweeps: int


def value_iteration_steps(mdp: AnyMDP, gamma: Scalar, *, tolerance: Scalar = 1e-6) -> Iterator[Step]:
    """The sweeps of `value_iteration` one after the other, each with the greedy policy of its values.

    The start is what they begin with: zeros, or the values of the uniform policy where those would be too high.
    """
    rewards = expected_rewards(mdp)
    values = _values_to_begin_with(mdp, rewards, gamma, tolerance)
    yield Step("start", values, uniform_policy(rewards), 0)
    for sweeps, after in enumerate(_every_sweep(mdp, rewards, None, values, gamma, tolerance), start=1):
        yield Step("sweep", after, greedy_policy(mdp, after, gamma, tolerance=tolerance), sweeps)


def policy_iteration_steps(
    mdp: AnyMDP,
    gamma: Scalar,
    *,
    tolerance: Scalar = 1e-6,
    max_improvements: int = 1_000,
    every_sweep: bool = True,
) -> Iterator[Step]:
    """The sweeps of every evaluation and the improvements of `policy_iteration`, one after the other.

    The last improvement is the greedy policy of its values.

    Args:
        mdp: the process.
        gamma: discount factor.
        tolerance: of the values.
        max_improvements: improvements end after this many.
        every_sweep: with a step for each sweep; otherwise an evaluation is one program, many times as fast, and steps
            are the start and the improvements.
    """
    rewards = expected_rewards(mdp)
    least = resting_values(mdp, rewards, gamma)
    values, policy, sweeps = jnp.zeros(len(rewards), rewards.dtype), uniform_policy(rewards), 0
    yield Step("start", values, policy, sweeps)
    for improvements in range(max_improvements + 1):
        before = values
        if every_sweep:
            for values in _every_sweep(mdp, rewards, policy, before, gamma, tolerance):
                sweeps += 1
                yield Step("evaluation", values, policy, sweeps)
        else:
            swept = _evaluate(mdp, rewards, policy, before, gamma, tolerance)
            values, sweeps = swept.values, sweeps + int(swept.sweeps)
        values = jnp.maximum(values, least)
        rise = jnp.abs(values - before).max() if improvements else jnp.inf  # the first began with no policy's values
        ends = rise <= smallest_change(values, gamma, tolerance) or improvements == max_improvements
        greedy = greedy_policy(mdp, values, gamma, tolerance=tolerance)
        policy = greedy if ends else unless_as_good(action_values(mdp, values, gamma), policy, greedy)
        yield Step("improvement", values, policy, sweeps)
        if ends:
            return


def _every_sweep(
    mdp: AnyMDP, rewards: Array, policy: Array | None, values: Array, gamma: Scalar, tolerance: Scalar
) -> Iterator[Array]:
    """The values after each of the sweeps that `sweep_until_converged` does."""
    for _ in range(MAX_SWEEPS):
        values, change = _one_sweep(mdp, rewards, policy, values, gamma)
        yield values
        if not change > smallest_change(values, gamma, tolerance):
            return


@jax.jit
def _evaluate(mdp: AnyMDP, rewards: Array, policy: Array, values: Array, gamma: Scalar, tolerance: Scalar) -> Swept:
    backup = evaluation_backup(mdp, rewards, policy, gamma)
    return sweep_until_converged(synchronous, gamma, tolerance, backup, values, MAX_SWEEPS)


@jax.jit
def _values_to_begin_with(mdp: AnyMDP, rewards: Array, gamma: Scalar, tolerance: Scalar) -> Array:
    return below_optimum(mdp, rewards, gamma, partial(sweep_until_converged, synchronous, gamma, tolerance)).values


@jax.jit
def _one_sweep(mdp: AnyMDP, rewards: Array, policy: Array | None, values: Array, gamma: Scalar) -> tuple[Array, Array]:
    """The values after a synchronous sweep, and the largest change; it improves where there is no policy."""
    if policy is None:
        backup = optimality_backup(mdp, rewards, gamma)
    else:
        backup = evaluation_backup(mdp, rewards, policy, gamma)
    after = synchronous(backup, values)
    return after, jnp.abs(after - values).max()

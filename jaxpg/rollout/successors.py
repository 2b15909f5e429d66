"""The successors of observations: the next row, or a final observation where a column breaks off."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpg.types import Array, Rollout, Transition, Tree


def timed_out(steps: Transition) -> Array:
    """[T, B], whether an episode ended here by time-out: the last step, with a discount of 1."""
    return steps.last & (steps.discount > 0)


def bootstraps_at(steps: Transition) -> Array:
    """[T, B], where a column breaks off: at a time-out, and at the end of the segment.

    Everywhere else the successor of an observation is the one below it, or the episode has terminated.
    """
    return timed_out(steps).at[-1].set(True)


def bootstrap_steps(steps: Transition, number: int) -> Array:
    """[number, B], the step at which each column breaks off for the k-th time; 0 where it does not."""
    broken = bootstraps_at(steps)
    nth = jnp.where(broken, jnp.cumsum(broken, 0) - 1, number)
    t, columns = jnp.indices(broken.shape)
    return jnp.zeros((number, broken.shape[1]), jnp.int32).at[nth, columns].set(t, mode="drop")


def successor_values(rollout: Rollout, v_tm1: Array, at_final_obs: Callable[[Tree], Array]) -> Array:
    """V of the successors, `[T, B]`, wherever the discount is not 0, for little more than the V(obs) that is known.

    Between two steps of an episode it is V(obs) one step on. What is left is where columns break off:
    `at_final_obs(rollout.final_obs)`, `[K, B]`. Without endings V is 0 there.
    """
    if not jax.tree.leaves(rollout.final_obs):
        return jnp.concatenate([v_tm1[1:], jnp.zeros_like(v_tm1[:1])])
    broken, v_end = bootstraps_at(rollout.steps), at_final_obs(rollout.final_obs)
    number = jnp.clip(jnp.cumsum(broken, 0) - 1, 0, v_end.shape[0] - 1)
    following = jnp.concatenate([v_tm1[1:], v_tm1[-1:]])
    return jnp.where(broken, jnp.take_along_axis(v_end, number, 0), following)

"""The successors of observations: the next row, or a final observation where a column breaks off."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Rollout, Transition, Tree
from jaxpg.vectorize import count_chunks


def timed_out(steps: Transition) -> Array:
    """[T, B], whether an episode ended here by time-out: the last step, with a discount of 1."""
    return steps.last & (steps.discount > 0)


def bootstraps_at(steps: Transition) -> Array:
    """[T, B], where a column breaks off: at time-outs, and at the end of the segment.

    Everywhere else the successor of an observation is the next row, or the episode has terminated.
    """
    return timed_out(steps).at[-1].set(True)


def bootstrap_steps(steps: Transition, slots: int) -> Array:
    """[slots, B], the step at which each column breaks off for the k-th time; 0 if it does not."""
    bootstraps = bootstraps_at(steps)
    slot = jnp.where(bootstraps, jnp.cumsum(bootstraps, 0) - 1, slots)
    t, columns = jnp.indices(bootstraps.shape)
    return jnp.zeros((slots, bootstraps.shape[1]), jnp.int32).at[slot, columns].set(t.astype(jnp.int32), mode="drop")


def rollout_values(rollout: Rollout, value: Callable[[Tree], Array]) -> tuple[Array, Array]:
    """V of the observations and V of their successors, `[T, B]` each, by a value function without a memory.

    `value(obs)` is V of observations with any leading axes. Successors are as in `successor_values`. Of many
    observations it gets a few steps at a time, which replaces one call: `Machine.rows_evaluated`.

    Raises:
        UserError: `value` gives something else than one number per observation.
    """
    num_steps, num_columns = rollout.steps.last.shape
    num_chunks = count_chunks(num_steps, max(1, machine().rows_evaluated // num_columns))
    obs = rollout.steps.obs
    v_tm1 = value(obs) if num_chunks == 1 else lax.map(value, obs, batch_size=num_steps // num_chunks)
    if jnp.shape(v_tm1) != (num_steps, num_columns):
        raise UserError(
            f"A value function gives one number per observation, {[num_steps, num_columns]} here, not an array of "
            f"shape {list(jnp.shape(v_tm1))}: take the last axis off, [..., 0]."
        )
    return v_tm1, successor_values(rollout, v_tm1, value)


def successor_values(rollout: Rollout, v_tm1: Array, value: Callable[[Tree], Array]) -> Array:
    """V of the successors, `[T, B]`, valid wherever the discount is not 0, from V(obs), `v_tm1`.

    Within an episode it is V(obs) of the next row. Where a column breaks off it is computed separately:
    `value(rollout.final_obs)`, `[K, B]`. Without final observations the last row is 0.
    """
    if not jax.tree.leaves(rollout.final_obs):
        return jnp.concatenate([v_tm1[1:], jnp.zeros_like(v_tm1[:1])])
    bootstraps, v_final = bootstraps_at(rollout.steps), value(rollout.final_obs)
    slot = jnp.clip(jnp.cumsum(bootstraps, 0) - 1, 0, v_final.shape[0] - 1)
    v_next_row = jnp.concatenate([v_tm1[1:], v_tm1[-1:]])
    return jnp.where(bootstraps, jnp.take_along_axis(v_final, slot, 0), v_next_row)


def successor_obs(rollout: Rollout) -> Tree:
    """The true successors of the observations, `[T, B, ...]`, valid wherever the discount is not 0."""
    if rollout.steps.reward.shape[0] == 1:  # the one row breaks off everywhere
        return jax.tree.map(lambda final: final[:1], rollout.final_obs)
    bootstraps = bootstraps_at(rollout.steps)
    slot, column = jnp.maximum(jnp.cumsum(bootstraps, 0) - 1, 0), jnp.indices(bootstraps.shape)[1]

    def successor(obs: Array, final: Array) -> Array:
        breaks_off = bootstraps.reshape(*bootstraps.shape, *[1] * (obs.ndim - 2))
        return jnp.where(breaks_off, final[slot, column], jnp.concatenate([obs[1:], obs[-1:]]))

    return jax.tree.map(successor, rollout.steps.obs, rollout.final_obs)

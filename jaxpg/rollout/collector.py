"""Experience: one scan over time of environments side by side.

Two shapes of it. A *continuing* rollout carries its environments from one call to the next and resets each the moment
its episode ends, so every step is real. An *episodic* rollout plays whole episodes from their start; those that end
early are padded and masked. Columns draw from keys of their own, numbered over all devices, so that how the columns are
laid over devices changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.types import Array, Env, Key, Policy, Rollout, Transition, Tree


class CollectorState(NamedTuple):
    """Where each environment stands, leaves `[B, ...]`.

    The last two are the return and the length of the episode under way. They follow from what a rollout recorded, so
    they are `()` while it is under way and where episodes are whole.
    """

    env_state: Tree
    obs: Tree
    memory: Tree
    episode_return: Tree = ()
    episode_length: Tree = ()


class RolloutStats(NamedTuple):
    """What a rollout went through, summed over all devices: environment steps, and episodes that ended."""

    steps: Array
    episodes: Array
    return_sum: Array
    length_sum: Array


class Collector(NamedTuple):
    """How experience is gathered.

    init(env, policy, params, key) -> runner: for all columns of all devices.
    collect(env, policy, params, runner, key) -> runner, Rollout, RolloutStats: for the columns of this device.
    num_envs: columns on all devices together.
    group_size: neighbouring columns that share their start state.
    """

    init: Callable[[Env, Policy, Tree, Key], Tree]
    collect: Callable[[Env, Policy, Tree, Tree, Key], tuple[Tree, Rollout, RolloutStats]]
    num_envs: int
    group_size: int = 1


def env_keys(key: Key, num_columns: int, group_size: int = 1, *, each: tuple[int, ...] = ()) -> Array:
    """Keys `[B, *each]` for every column of this device, the same for all columns of a group.

    All in one call, by their number: random-number code is a large part of what there is to compile.
    """
    columns = collectives.shard_index() * num_columns + jnp.arange(num_columns)
    per_column = math.prod(each)
    numbers = (columns // group_size * per_column)[:, None] + jnp.arange(per_column)[None]
    return jax.vmap(partial(jax.random.fold_in, key))(numbers.ravel()).reshape(num_columns, *each)


def reset_env(env: Env, policy: Policy, params: Tree, key: Key) -> CollectorState:
    """One environment at the start of an episode."""
    env_state, obs = env.reset(key)
    memory = policy.start(params, env.initial_input(env_state, obs))
    return CollectorState(env_state, obs, memory)


def action_noise(policy: Policy, params: Tree, runner: CollectorState, keys: Array) -> Tree:
    """The random numbers of all actions, from their keys `[T, B]`: one call outside the scan instead of T within it."""
    one = jax.tree.map(lambda x: x[0], (runner.memory, runner.obs))
    distribution, _ = jax.eval_shape(partial(policy.act, params), *one)
    return jax.vmap(jax.vmap(distribution.noise))(keys)


def step_env(
    env: Env, policy: Policy, params: Tree, runner: CollectorState, noise: Tree, step_key: Key
) -> tuple[CollectorState, Transition]:
    """One step of one environment, without a reset."""
    distribution, memory = policy.act(params, runner.memory, runner.obs)
    action = distribution.at(noise)
    env_state, timestep = env.step(step_key, runner.env_state, action)
    transition = Transition(
        obs=runner.obs,
        action=action,
        log_prob=distribution.log_prob(action),
        reward=timestep.reward,
        discount=timestep.discount,
        last=timestep.last,
        mask=jnp.ones_like(timestep.reward),
    )
    return CollectorState(env_state, timestep.obs, memory), transition


def total_stats(stats: RolloutStats) -> RolloutStats:
    """Sums over the columns of all devices."""
    return collectives.psum(jax.tree.map(jnp.sum, stats))

"""Shared by both kinds of rollout: the record of a collector, the random keys, and one step of one environment.

Experience is collected by one compiled loop over time, with the environments side by side. A *continuing* rollout
(segments.py) carries its environments from one call to the next and resets each as its episode ends, so every step is
real. An *episodic* rollout (episodes.py) runs whole episodes from their start; those that end early are padded and
masked. Every column of `[T, B]` has its own keys, numbered over all devices, so the result does not depend on how the
columns are split over devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.types import Actor, Array, Env, Key, Policy, Rollout, Scalar, Transition, Tree


class CollectorState(NamedTuple):
    """The current state of each environment, leaves `[B, ...]`.

    env_state, obs: of the environment.
    memory: the policy's memory.
    episode_return, episode_length: of the episode in progress, `[B]`. They are kept between continuing rollouts only
        and are `()` inside their scan (`segments.episode_stats`).
    """

    env_state: Tree
    obs: Tree
    memory: Tree
    episode_return: Tree = ()
    episode_length: Tree = ()


class RolloutStats(NamedTuple):
    """Sums over a rollout on all devices, [] float32 each.

    steps: environment steps.
    episodes: episodes that ended.
    return_sum, length_sum: their undiscounted returns and their lengths.
    of_env: by name, their numbers of `Env.episode_metrics`.
    """

    steps: Array
    episodes: Array
    return_sum: Array
    length_sum: Array
    of_env: Mapping[str, Array] = {}


class Collector(NamedTuple):
    """How experience is collected.

    init(env, policy, params, key) -> runner: the environments of all devices, CollectorState or `()`.
    collect(env, policy, params, runner, key) -> runner, Rollout, RolloutStats: for the environments of this device.
    num_envs: environments on all devices together.
    group_size: number of neighbouring columns that share a start state.
    whole_episodes: whether every column is one whole episode.
    gamma: the discount of the returns by which it chooses episodes, None if it takes them as they come.
    """

    init: Callable[[Env, Policy, Tree, Key], Tree]
    collect: Callable[[Env, Policy, Tree, Tree, Key], tuple[Tree, Rollout, RolloutStats]]
    num_envs: int
    group_size: int = 1
    whole_episodes: bool = False
    gamma: Scalar | None = None


class StepKeys(NamedTuple):
    """The keys of the steps of a rollout by purpose, `[T, B]` each.

    action: for sampling the action.
    env: for `Env.step`.
    reset: for `Env.reset` if the episode ends with the step, `()` in rollouts whose steps reset nothing.
    """

    action: Array
    env: Array
    reset: Tree = ()


def env_keys(
    key: Key, num_columns: int, group_size: int = 1, *, shape: tuple[int, ...] = (), numbers: Array | None = None
) -> Array:
    """Keys `[B, *shape]` for the columns of this device; the columns of a group get the same keys.

    Key number i of column b is `fold_in(key, b // group_size * prod(shape) + i)`, with b counted over all devices;
    with `numbers`, those alone, `[B, *numbers.shape]`. All keys come from one call, because random-number code is a
    third of the compile time. A key of the old form, of `jax.random.PRNGKey`, becomes one of the new.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    columns = collectives.shard_index() * num_columns + jnp.arange(num_columns)
    per_column = math.prod(shape)
    if numbers is None:
        numbers = jnp.arange(per_column).reshape(shape)
    of_columns = (columns // group_size * per_column)[:, None] + numbers.ravel()[None]
    return jax.vmap(partial(jax.random.fold_in, key))(of_columns.ravel()).reshape(num_columns, *numbers.shape)


def step_keys(key: Key, num_columns: int, num_steps: int, *, with_reset: bool, steps: Array | None = None) -> StepKeys:
    """The keys of all steps of the columns of this device, or of these `steps` alone, `[n]`."""
    shape = (num_steps, 3 if with_reset else 2)
    numbers = None if steps is None else steps[:, None] * shape[1] + jnp.arange(shape[1])[None]
    keys = env_keys(key, num_columns, shape=shape, numbers=numbers).swapaxes(0, 1)
    keys = jax.random.clone(keys)  # `jax_debug_key_reuse` takes a column of keys with moved axes for all of them
    return StepKeys(*(keys[..., purpose] for purpose in range(keys.shape[-1])))


def reset_env(env: Env, policy: Policy, params: Tree, key: Key) -> CollectorState:
    """One environment at the start of an episode."""
    return _started(env, policy, params, *env.reset(key))


def restart_env(
    env: Env, policy: Policy, params: Tree, key: Key, wanted: Array, moved: CollectorState
) -> CollectorState:
    """`reset_env` of an environment on the host, which is reset only where `wanted`."""
    assert env.host is not None
    return _started(env, policy, params, *env.host.restart(key, wanted, moved.env_state))


def _started(env: Env, policy: Policy, params: Tree, env_state: Tree, obs: Tree) -> CollectorState:
    check_room(env, policy)
    memory = policy.start(params, env.initial_input(env_state, obs))
    return CollectorState(env_state, obs, memory)


def check_room(env: Env, policy: Policy | Actor) -> None:
    """Refuse an environment whose episodes may be longer than `Policy.max_steps`.

    Raises:
        UserError: they may, and a memory without room for them would lose what comes last, without a word.
    """
    if policy.max_steps is not None and env.time_limit > policy.max_steps:
        raise UserError(
            f"The policy has room for episodes of {policy.max_steps} steps, and those of {env.name} have up to "
            f"{env.time_limit}: make the policy for this environment. Its parameters stay valid there."
        )


def acting_params(policy: Policy, params: Tree) -> Tree:
    """The parameters as `policy.start` and `policy.act` read them, to be made once before a loop over steps.

    On SHARD every device gets all of them, since XLA would otherwise gather each layer's at every step: of a language
    model, all weights at every token (benchmarks/multichip.py).
    """
    return collectives.gathered(policy.for_acting(params))


def make_actor(policy: Policy, params: Tree) -> Actor:
    """The actor of a policy with these parameters."""
    params = acting_params(policy, params)

    def act(memory: Tree, obs: Tree, key: Key, greedy: bool) -> tuple[Array, Tree]:
        distribution, memory = policy.act(collectives.whole(params), memory, obs)
        return distribution.mode() if greedy else distribution.sample(key), memory

    return Actor(start=partial(policy.start, params), act=act, max_steps=policy.max_steps)


def action_noise(policy: Policy, params: Tree, runner: CollectorState, keys: Array) -> Tree:
    """The random numbers of all actions, from their keys `[T, B]`, in one call before the loop over steps.

    It replaces `distribution.sample(key)` at every step, on every platform, with the same actions (up to rounding where
    they are continuous). The gain is on a CPU, where XLA wakes another thread whenever more than eight calls are ready:
    without random numbers a step stays below that, and collecting with 4 environments takes half the CPU time
    (benchmarks/LOG.md, "four environments again").
    """
    one = jax.tree.map(lambda x: x[0], (runner.memory, runner.obs))
    distribution, _ = jax.eval_shape(partial(policy.act, params), *one)
    return jax.vmap(jax.vmap(distribution.noise))(keys)


def step_env(
    env: Env, policy: Policy, params: Tree, runner: CollectorState, noise: Tree, step_key: Key
) -> tuple[CollectorState, Transition]:
    """One step of one environment, without a reset."""
    distribution, memory = policy.act(collectives.whole(params), runner.memory, runner.obs)
    action = distribution.at(noise)
    env_state, timestep = env.step(step_key, runner.env_state, env.action_space.nearest(action))
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


def episode_numbers(env: Env, states: Tree, ended: Array) -> dict[str, Array]:
    """By name, the numbers `[B]` of the episodes that ended in these states, 0 where none has (`ended`, `[B]` bool)."""
    if env.episode_metrics is None:
        return {}
    found = jax.vmap(env.episode_metrics)(states)
    return {name: jnp.where(ended, jnp.asarray(x, jnp.float32), 0.0) for name, x in found.items()}


def total_stats(stats: RolloutStats) -> RolloutStats:
    """Statistics per column, `[B]`, summed over the columns of all devices."""
    return collectives.psum(jax.tree.map(jnp.sum, stats))

"""Continuing rollouts: segments of environments that are reset the moment their episode ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import (
    Collector,
    CollectorState,
    RolloutStats,
    action_noise,
    env_keys,
    reset_env,
    step_env,
    total_stats,
)
from jaxpg.rollout.successors import timed_out
from jaxpg.types import Array, Env, Episodes, Key, Policy, Rollout, Transition, Tree
from jaxpg.vectorize import any_in_batch, tree_where


def continuing(*, num_envs: int, num_steps: int, reset_pool: int = 0) -> Collector:
    """Segments of `num_steps` steps of `num_envs` environments that are reset as their episodes end.

    Every reset is fresh by default. With `reset_pool` = n, each column draws n start states per segment, before the
    scan, and uses them in turn (from the first again when more than n episodes end in it): cheaper where a reset
    costs much, exact in distribution as long as no column ends more than n episodes.
    """
    return Collector(
        init=partial(_reset_all, num_envs=num_envs),
        collect=partial(_collect_segment, num_steps=num_steps, reset_pool=reset_pool),
        num_envs=num_envs,
    )


def _reset_all(env: Env, policy: Policy, params: Tree, key: Key, *, num_envs: int) -> CollectorState:
    if env.context or env.outcome:
        raise UserError(f"{env.name} is judged by whole episodes. Collect whole episodes: num_steps = none.")
    runner = jax.vmap(partial(reset_env, env, policy, params))(env_keys(key, num_envs))
    return runner._replace(episode_return=jnp.zeros(num_envs), episode_length=jnp.zeros(num_envs, jnp.int32))


def _collect_segment(
    env: Env, policy: Policy, params: Tree, runner: CollectorState, key: Key, *, num_steps: int, reset_pool: int
) -> tuple[CollectorState, Rollout, RolloutStats]:
    num_columns = runner.episode_length.shape[0]
    before = jax.tree.map(collectives.shard_columns, runner)
    slots = 1 + -(-(num_steps - 1) // env.min_truncation_step)
    begin = partial(reset_env, env, policy, params)

    def start(key: Key, pool: Tree, episodes: Array) -> CollectorState:
        return jax.tree.map(lambda x: x[episodes % reset_pool], pool) if reset_pool else begin(key)

    def step(
        carry: tuple[CollectorState, Array, Tree, Array], inputs: tuple[Array, Tree, Array]
    ) -> tuple[tuple, Transition]:
        runner, episodes, final_obs, used = carry
        t, noise, keys = inputs
        moved, transition = jax.vmap(partial(step_env, env, policy, params))(runner, noise, keys[:, 0])
        last, broken = transition.last, timed_out(transition) | (t == num_steps - 1)

        def restarted(moved: CollectorState) -> CollectorState:
            return jax.vmap(tree_where)(last, jax.vmap(start)(keys[:, -1], pool, episodes), moved)

        final_obs = _update_where_any(
            broken, partial(_keep_final_obs, seen=moved.obs, broken=broken, used=used), final_obs
        )
        return (_update_where_any(last, restarted, moved), episodes + last, final_obs, used + broken), transition

    pool: Tree = ()
    if reset_pool:
        key, pool_key = jax.random.split(key)
        pool = jax.vmap(jax.vmap(begin))(env_keys(pool_key, num_columns, each=(reset_pool,)))
    keys = env_keys(key, num_columns, each=(num_steps, 2 if reset_pool else 3)).swapaxes(0, 1)
    final_obs = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), before.obs)
    none = jnp.zeros(num_columns, jnp.int32)
    carry = (before._replace(episode_return=(), episode_length=()), none, final_obs, none)
    noise = action_noise(policy, params, before, keys[..., 0])
    (after, _, final_obs, _), steps = lax.scan(step, carry, (jnp.arange(num_steps), noise, keys[..., 1:]))
    steps = steps._replace(mask=jnp.ones_like(steps.reward))  # as they are; but nothing is stored at every step for it
    episode_return, episode_length, stats = episode_stats(before, steps)
    after = after._replace(episode_return=episode_return, episode_length=episode_length)
    return after, Rollout(steps, steps.mask, final_obs, Episodes(memory=before.memory)), total_stats(stats)


def episode_stats(before: CollectorState, steps: Transition) -> tuple[Array, Array, RolloutStats]:
    """Return and length of the episodes under way behind a segment, and the tally of those that ended within it.

    What was under way before the segment and what came within it belongs to the ended ones, but for what came behind
    the last end.
    """
    t = jnp.arange(steps.last.shape[0])[:, None]
    last_end = jnp.where(steps.last, t, -1).max(0)
    ended, under_way = last_end >= 0, t > last_end[None]
    returns, lengths = before.episode_return + steps.reward.sum(0), before.episode_length + len(steps.last)
    new_return, new_length = (steps.reward * under_way).sum(0), under_way.sum(0, dtype=jnp.int32)
    stats = RolloutStats(
        steps=steps.mask.sum(0),
        episodes=steps.last.sum(0, dtype=jnp.float32),
        return_sum=ended * (returns - new_return),
        length_sum=(ended * (lengths - new_length)).astype(jnp.float32),
    )
    return jnp.where(ended, new_return, returns), jnp.where(ended, new_length, lengths), stats


def _update_where_any(condition: Array, change: Callable[[Tree], Tree], unchanged: Tree) -> Tree:
    """`change(unchanged)`, which may be left out where no `condition` is true, since it then changes nothing.

    On a CPU it is; deciding costs an accelerator more than doing it.
    """
    if jax.default_backend() != "cpu":
        return change(unchanged)
    return lax.cond(any_in_batch(condition), change, lambda unchanged: unchanged, unchanged)


def _keep_final_obs(final_obs: Tree, *, seen: Tree, broken: Array, used: Array) -> Tree:
    """Put what was `seen`, `[B, ...]`, into the next free slot of the columns that are `broken`."""
    slot = jnp.where(broken, used, jax.tree.leaves(final_obs)[0].shape[0])
    columns = jnp.arange(broken.shape[0])
    return jax.tree.map(lambda kept, x: kept.at[slot, columns].set(x, mode="drop"), final_obs, seen)

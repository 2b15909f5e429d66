"""Episodic rollouts: whole episodes from their start, padded and masked behind their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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


def episodic(*, num_envs: int, group_size: int = 1) -> Collector:
    """`num_envs` whole episodes, in contiguous groups of `group_size` that share their start state.

    The rollout is `env.time_limit` long, and what lies behind the end of an episode is masked; collecting ends with the
    last episode. It raises a UserError where the episodes of a device do not divide into groups.
    """
    return Collector(
        init=_no_state,
        collect=partial(_collect_episodes, num_envs=num_envs, group_size=group_size),
        num_envs=num_envs,
        group_size=group_size,
    )


def with_overlong_filtering(collector: Collector) -> Collector:
    """Episodes that the time limit cut off are real, but do not train (DAPO, section 3.4, overlong filtering)."""
    return collector._replace(collect=partial(_collect_filtered, collector.collect))


def _no_state(env: Env, policy: Policy, params: Tree, key: Key) -> tuple[()]:
    """Episodic rollouts start afresh every time."""
    return ()


def _collect_episodes(
    env: Env, policy: Policy, params: Tree, runner: tuple[()], key: Key, *, num_envs: int, group_size: int
) -> tuple[tuple[()], Rollout, RolloutStats]:
    num_columns = num_envs // collectives.num_shards()
    if num_columns % group_size:
        raise UserError(
            f"{num_columns} episodes per device do not divide into groups of {group_size}: make the number of "
            "environments a multiple of the group size on every device."
        )
    start_key, step_key = jax.random.split(key)
    start = jax.vmap(partial(reset_env, env, policy, params))(env_keys(start_key, num_columns, group_size))
    start = jax.tree.map(collectives.shard_columns, start)
    keys = env_keys(step_key, num_columns, each=(env.time_limit, 2)).swapaxes(0, 1)

    noise = action_noise(policy, params, start, keys[..., 0])

    def column(runner: CollectorState, over: Array, noise: Tree, key: Key) -> tuple[CollectorState, Array, Transition]:
        moved, transition = step_env(env, policy, params, runner, noise, key)
        halted = tree_where(over, runner._replace(memory=()), moved._replace(memory=()))
        # What is remembered behind the end is never read, and selecting it would copy it: a KV cache, at every token.
        return (
            halted._replace(memory=moved.memory),
            over | transition.last,
            tree_where(over, _padding(transition), transition),
        )

    def unfinished(carry: tuple[Array, CollectorState, Array, Transition]) -> Array:
        t, _, over, _ = carry
        return (t < env.time_limit) & any_in_batch(~over)

    def step(carry: tuple[Array, CollectorState, Array, Transition]) -> tuple[Array, CollectorState, Array, Transition]:
        t, runner, over, steps = carry
        now = jax.tree.map(lambda x: x[t], (noise, keys[..., 1]))
        runner, over, transition = jax.vmap(column)(runner, over, *now)
        return t + 1, runner, over, jax.tree.map(lambda all_, one: all_.at[t].set(one), steps, transition)

    over = jnp.zeros(num_columns, bool)
    one = jax.eval_shape(jax.vmap(column), start, over, *jax.tree.map(lambda x: x[0], (noise, keys[..., 1])))[-1]
    blank = _padding(jax.tree.map(lambda x: jnp.zeros((env.time_limit, *x.shape), x.dtype), one))
    t = jnp.zeros((), jnp.int32)
    _, after, over, steps = lax.while_loop(unfinished, step, (t, start, over, blank))
    length, ended = steps.mask.sum(0), over.astype(jnp.float32)
    episodes = Episodes(
        memory=() if policy.evaluates_from_context else start.memory,
        context=jax.vmap(env.context)(start.env_state) if env.context else (),
    )
    if env.outcome:
        outcome = jax.vmap(env.outcome)(after.env_state)
        at_end = steps.reward.at[length.astype(jnp.int32) - 1, jnp.arange(num_columns)].add(outcome.reward)
        steps, episodes = steps._replace(reward=at_end), episodes._replace(outcome=outcome, length=length)
    final_obs = jax.tree.map(lambda x: x[None], after.obs)
    stats = RolloutStats(length, ended, ended * (steps.reward * steps.mask).sum(0), ended * length)
    return (), Rollout(steps, steps.mask, final_obs, episodes), total_stats(stats)


def _padding(steps: Transition) -> Transition:
    """What stands in place of steps behind the end of an episode."""
    return steps._replace(
        reward=jnp.zeros_like(steps.reward),
        discount=jnp.zeros_like(steps.discount),
        last=jnp.ones_like(steps.last),
        mask=jnp.zeros_like(steps.mask),
    )


def _collect_filtered(
    collect: Callable[..., tuple[Tree, Rollout, RolloutStats]], *arguments: Any
) -> tuple[Tree, Rollout, RolloutStats]:
    runner, rollout, stats = collect(*arguments)
    return runner, rollout._replace(loss_mask=rollout.loss_mask * ~truncated(rollout.steps)[None]), stats


def truncated(steps: Transition) -> Array:
    """[B], whether the time limit ended the episode of a column, rather than a termination."""
    return (timed_out(steps) & (steps.mask > 0)).any(0)

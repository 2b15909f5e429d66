"""Continuing rollouts: segments of environments that are reset as soon as their episode ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.rollout.collector import (
    Collector,
    CollectorState,
    RolloutStats,
    acting_params,
    action_noise,
    env_keys,
    episode_numbers,
    reset_env,
    restart_env,
    step_env,
    step_keys,
    total_stats,
)
from jaxpg.rollout.successors import timed_out
from jaxpg.types import Array, Env, Episodes, Key, Policy, Rollout, Transition, Tree
from jaxpg.user_input.domains import COUNT_OR_0, check_whole
from jaxpg.vectorize import any_in_batch, as_row, copy_tree, scan_packed, tree_where

NextStarts = Callable[[Tree, Array, Array, CollectorState], CollectorState]
"""(reset keys, episodes that each column has ended in this segment, where one ends now, the states it ends in),
`[B]` each -> start states of all columns."""


class _SegmentState(NamedTuple):
    """What the scan over the steps of a segment carries.

    runner: the environments, without return and length of their episodes.
    episodes: [B] int32, episodes that have ended in this segment.
    final_obs: [K, B] or [K, B, n], the final observations so far (see `Rollout.final_obs`), each as a row.
    num_final: [B] int32, how many of them are filled.
    of_env: by name, [B], the sums of `Env.episode_metrics` over the episodes that have ended.
    """

    runner: CollectorState
    episodes: Array
    final_obs: Tree
    num_final: Array
    of_env: Mapping[str, Array]


class _StepInputs(NamedTuple):
    """The inputs of each step of the scan, leaves `[T, ...]`.

    t: the number of the step.
    noise: random numbers of the actions, `[T, B, ...]`.
    env_key, reset_key: see StepKeys.
    """

    t: Array
    noise: Tree
    env_key: Array
    reset_key: Tree


def continuing(*, num_envs: int, num_steps: int, reset_pool: int = 0) -> Collector:
    """Segments of `num_steps` steps of `num_envs` environments, each reset when its episode ends.

    Every reset is fresh by default. With `reset_pool` = n, each column draws n start states per segment, before the
    scan, and uses them in turn, starting over if more than n of its episodes end. That is cheaper where a reset is
    expensive, and exact in distribution as long as no column ends more than n episodes in a segment.

    Raises:
        UserError: no environments or no steps; the environment gives its reward for whole episodes (`Env.outcome`) or
            has a context (when `init` is called).
    """
    num_envs, num_steps = check_whole("num_envs", num_envs), check_whole("num_steps", num_steps)
    reset_pool = check_whole("reset_pool", reset_pool, COUNT_OR_0)
    return Collector(
        init=partial(_reset_all, num_envs=num_envs),
        collect=partial(_collect_segment, num_steps=num_steps, reset_pool=reset_pool),
        num_envs=num_envs,
    )


def _reset_all(env: Env, policy: Policy, params: Tree, key: Key, *, num_envs: int) -> CollectorState:
    if env.context or env.outcome:
        raise UserError(
            f"{env.name} gives its reward for whole episodes. Collect whole episodes: with num_steps = none, which "
            "a2c, trpo and ppo take, or by an algorithm that always does, such as actor_critic_mc or grpo."
        )
    runner = jax.vmap(partial(reset_env, env, policy, params))(env_keys(key, num_envs))
    return runner._replace(
        obs=copy_tree(runner.obs),  # which may be the environment's state itself
        episode_return=jnp.zeros(num_envs),
        episode_length=jnp.zeros(num_envs, jnp.int32),
    )


def _collect_segment(
    env: Env, policy: Policy, params: Tree, runner: CollectorState, key: Key, *, num_steps: int, reset_pool: int
) -> tuple[CollectorState, Rollout, RolloutStats]:
    params, num_columns = acting_params(policy, params), runner.episode_length.shape[0]
    before = jax.tree.map(collectives.shard_columns, runner)
    reset = partial(reset_env, env, policy, params)
    next_starts: NextStarts = partial(_fresh_starts, reset)
    if env.host:
        next_starts = _host_starts(partial(restart_env, env, policy, params), reset_pool)
    if reset_pool:
        key, pool_key = jax.random.split(key)
        pool = jax.vmap(jax.vmap(reset))(env_keys(pool_key, num_columns, shape=(reset_pool,)))
        next_starts = partial(_pooled_starts, pool, reset_pool)
    keys = step_keys(key, num_columns, num_steps, with_reset=not reset_pool)
    noise = action_noise(policy, params, before, keys.action)
    inputs = _StepInputs(jnp.arange(num_steps), noise, keys.env, keys.reset)

    def step(state: _SegmentState, inputs: _StepInputs) -> tuple[_SegmentState, Transition]:
        moved, transition = jax.vmap(partial(step_env, env, policy, params))(state.runner, inputs.noise, inputs.env_key)
        bootstraps = timed_out(transition) | (inputs.t == num_steps - 1)
        starts = partial(next_starts, inputs.reset_key)
        return _next_state(env, state, moved, transition.last, bootstraps, starts), transition

    first = _initial_state(env, before, final_obs_slots(env, num_steps))
    after, steps = scan_packed(step, first, inputs, in_rounds=True)
    steps = steps._replace(mask=jnp.ones_like(steps.reward))  # a constant, which the scan need not store step by step
    final_obs = jax.tree.map(lambda rows, x: rows.reshape(-1, *x.shape), after.final_obs, before.obs)
    runner, stats = episode_stats(before, after.runner, steps)
    stats = total_stats(stats._replace(of_env=after.of_env))
    return runner, Rollout(steps, steps.mask, final_obs, Episodes(memory=before.memory)), stats


def final_obs_slots(env: Env, num_steps: int) -> int:
    """K of `Rollout.final_obs`: how often a column of `num_steps` steps can break off.

    Once at the end of the segment, and before it at time-outs, which are at least `env.min_truncation_step` steps
    apart. If that is 1, the default, there is a slot for every step, which costs memory.
    """
    return 1 + -(-(num_steps - 1) // env.min_truncation_step)


def _fresh_starts(
    reset: Callable[[Key], CollectorState], reset_key: Array, episodes: Array, last: Array, moved: CollectorState
) -> CollectorState:
    return jax.vmap(reset)(reset_key)


def _host_starts(restart: Callable[..., CollectorState], reset_pool: int) -> NextStarts:
    """Fresh starts of environments on the host, of those alone whose episode has ended.

    Raises:
        UserError: start states are to be taken from a pool.
    """
    if reset_pool:
        raise UserError("reset_pool copies start states, and those of an environment on the host cannot be copied.")
    return lambda reset_key, episodes, last, moved: jax.vmap(restart)(reset_key, last, moved)


def _pooled_starts(
    pool: CollectorState, size: int, reset_key: tuple[()], episodes: Array, last: Array, moved: CollectorState
) -> CollectorState:
    """The next state in turn of each column's pool, leaves `[B, size, ...]`."""
    return jax.vmap(lambda states, number: jax.tree.map(lambda x: x[number % size], states))(pool, episodes)


def _initial_state(env: Env, before: CollectorState, slots: int) -> _SegmentState:
    """The state at the start of a segment.

    The return and length of the episode in progress are left out of the scan: they follow from the recorded steps
    (`episode_stats`). A step that does not add them up has fewer calls for XLA to hand to other threads on a CPU
    (benchmarks/LOG.md, "four environments again": a gain only together with `action_noise`).
    """
    none = jnp.zeros(before.episode_length.shape[0], jnp.int32)
    final_obs = jax.tree.map(lambda x: jnp.zeros((slots, *as_row(x).shape), x.dtype), before.obs)
    numbers = jax.eval_shape(partial(episode_numbers, env), before.env_state, none == 1)
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in numbers.items()}
    return _SegmentState(before._replace(episode_return=(), episode_length=()), none, final_obs, none, zeros)


def _next_state(
    env: Env,
    state: _SegmentState,
    moved: CollectorState,
    last: Array,
    bootstraps: Array,
    next_starts: Callable[[Array, Array, CollectorState], CollectorState],
) -> _SegmentState:
    """The state after a step to `moved`: final observations stored, ended episodes replaced by new ones."""

    def store(final_obs: Tree) -> Tree:
        return _store_final_obs(final_obs, moved.obs, bootstraps, state.num_final)

    def restart(moved: CollectorState) -> CollectorState:
        return jax.vmap(tree_where)(last, next_starts(state.episodes, last, moved), moved)

    def add_numbers(sums: Tree) -> Tree:
        return jax.tree.map(jnp.add, sums, episode_numbers(env, moved.env_state, last))

    return _SegmentState(
        final_obs=_update_where_any(bootstraps, store, state.final_obs),
        runner=_update_where_any(last, restart, moved),
        episodes=state.episodes + last,
        num_final=state.num_final + bootstraps,
        of_env=_update_where_any(last, add_numbers, state.of_env) if env.episode_metrics else {},
    )


def _store_final_obs(final_obs: Tree, obs: Tree, bootstraps: Array, num_final: Array) -> Tree:
    """Write `obs`, `[B, ...]`, into the next free slot of the columns that break off.

    By a scatter, or, of few slots, by rewriting them all (`Machine.few_final_obs`).
    """
    slots = len(jax.tree.leaves(final_obs)[0])
    slot = jnp.where(bootstraps, num_final, slots)  # past the last slot: dropped
    if slots <= machine().few_final_obs:
        chosen = jnp.arange(slots)[:, None] == slot[None]

        def rewrite(kept: Array, x: Array) -> Array:
            return jnp.where(chosen.reshape(*chosen.shape, *(1,) * (kept.ndim - 2)), as_row(x)[None], kept)

        return jax.tree.map(rewrite, final_obs, obs)
    columns = jnp.arange(bootstraps.shape[0])
    return jax.tree.map(lambda kept, x: kept.at[slot, columns].set(as_row(x), mode="drop"), final_obs, obs)


def _update_where_any(condition: Array, update: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`update(tree)`, for an update that changes nothing where no `condition` is true.

    Where the machine gains by it, a `lax.cond` replaces the plain call, so that a step at which no episode ends pays
    for no reset and for no stored observation: `Machine.resets_where_any`.
    """
    if not machine().resets_where_any:
        return update(tree)
    return lax.cond(any_in_batch(condition), update, lambda tree: tree, tree)


def episode_stats(
    before: CollectorState, after: CollectorState, steps: Transition
) -> tuple[CollectorState, RolloutStats]:
    """The state after a segment with return and length of its episodes in progress, and statistics per column, `[B]`.

    The steps after the last end of a column belong to the episode in progress, all before them to those that ended. The
    two are summed apart: of a difference, a large reward of one would leave nothing of the other.
    """
    t = jnp.arange(steps.last.shape[0])[:, None]
    last_end = jnp.where(steps.last, t, -1).max(0)
    ended, in_progress = last_end >= 0, t > last_end[None]
    new_return, new_length = (steps.reward * in_progress).sum(0), in_progress.sum(0, dtype=jnp.int32)
    ended_return = before.episode_return + (steps.reward * ~in_progress).sum(0)
    lengths = before.episode_length + len(steps.last)
    stats = RolloutStats(
        steps=steps.mask.sum(0),
        episodes=steps.last.sum(0, dtype=jnp.float32),
        return_sum=jnp.where(ended, ended_return, 0.0),
        length_sum=(ended * (lengths - new_length)).astype(jnp.float32),
    )
    after = after._replace(
        episode_return=jnp.where(ended, new_return, before.episode_return + new_return),
        episode_length=jnp.where(ended, new_length, lengths),
    )
    return after, stats

"""Episodic rollouts: whole episodes from their start, padded and masked after their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
    StepKeys,
    acting_params,
    action_noise,
    env_keys,
    episode_numbers,
    reset_env,
    step_env,
    step_keys,
    total_stats,
)
from jaxpg.rollout.successors import timed_out
from jaxpg.types import Array, Env, Episodes, Key, Outcome, Policy, Rollout, Transition, Tree
from jaxpg.user_input.domains import check_whole
from jaxpg.vectorize import any_in_batch, row_storage, tree_where

MOST_ROOMS = 4
"""Parts of a rollout, at most, between which a memory grows: the loop over steps is compiled once for each."""


class _EpisodesState(NamedTuple):
    """What the loop over steps carries.

    t: [] int32, steps taken.
    runner: the environments, which stay as they are after the end of their episode.
    over: [B] bool, whether the episode has ended.
    steps: [T, B, ...], filled up to `t`; padding from there on. Within the loop as `RowStorage` stores them.
    """

    t: Array
    runner: CollectorState
    over: Array
    steps: Any


class _Drawn(NamedTuple):
    """Random numbers of some steps.

    first: [] int32, the number of the first of them.
    noise: [n, B, ...], of the actions.
    keys: [n, B], of the environments.
    """

    first: Array
    noise: Tree
    keys: Array


def episodic(*, num_envs: int, group_size: int = 1) -> Collector:
    """`num_envs` whole episodes, in contiguous groups of `group_size` that share their start state.

    The rollout has `env.time_limit` rows, and rows after the end of an episode are masked. Collecting stops when the
    last episode has ended.

    Raises:
        UserError: no episodes; they do not divide into groups, or those of a device do not (when `collect` is traced).
    """
    num_envs, group_size = check_whole("num_envs", num_envs), check_whole("group_size", group_size)
    check_groups(num_envs, group_size)
    return Collector(
        init=_no_state,
        collect=partial(_collect_episodes, num_envs=num_envs, group_size=group_size),
        num_envs=num_envs,
        group_size=group_size,
        whole_episodes=True,
    )


def with_overlong_filtering(collector: Collector) -> Collector:
    """Episodes cut off by the time limit stay real steps but take no part in the loss (DAPO, section 3.4).

    Raises:
        UserError: the collector returns segments, whose columns are no episodes.
    """
    if not collector.whole_episodes:
        raise UserError("with_overlong_filtering leaves out whole episodes, so it takes rollout.episodic(...).")
    return collector._replace(collect=partial(_collect_filtered, collector.collect))


def truncated(steps: Transition) -> Array:
    """[B], whether the time limit ended the episode of a column, rather than a termination."""
    return (timed_out(steps) & (steps.mask > 0)).any(0)


def _collect_filtered(
    collect: Callable[..., tuple[Tree, Rollout, RolloutStats]], *arguments: Any
) -> tuple[Tree, Rollout, RolloutStats]:
    runner, rollout, stats = collect(*arguments)
    return runner, rollout._replace(loss_mask=rollout.loss_mask * ~truncated(rollout.steps)[None]), stats


def _no_state(env: Env, policy: Policy, params: Tree, key: Key) -> tuple[()]:
    """Episodic rollouts carry nothing from one call to the next."""
    return ()


def _collect_episodes(
    env: Env, policy: Policy, params: Tree, runner: tuple[()], key: Key, *, num_envs: int, group_size: int
) -> tuple[tuple[()], Rollout, RolloutStats]:
    params, num_columns = acting_params(policy, params), _columns_per_device(num_envs, group_size)
    start_key, step_key = jax.random.split(key)
    start = _start_groups(env, policy, params, env_keys(start_key, num_columns, group_size), group_size)
    keys = partial(step_keys, step_key, num_columns, env.time_limit, with_reset=False)
    end = _run_episodes(env, policy, params, start, keys)

    steps, length = end.steps, end.steps.mask.sum(0)
    context = jax.vmap(env.context)(start.env_state) if env.context else ()
    episodes = Episodes(memory=_initial_memory(policy, start), context=context)
    if env.outcome:
        outcome = jax.vmap(env.outcome)(end.runner.env_state)
        steps = _add_outcome(steps, outcome, length)
        terms = {name: outcome.parts[f"reward_{name}"] for name in env.reward_terms or ()} or ()
        episodes = episodes._replace(outcome=outcome, length=length, reward_terms=terms)
    final_obs = jax.tree.map(lambda x: x[None], end.runner.obs)
    ended = end.over.astype(jnp.float32)
    numbers = episode_numbers(env, end.runner.env_state, end.over)
    stats = RolloutStats(length, ended, ended * (steps.reward * steps.mask).sum(0), ended * length, numbers)
    return (), Rollout(steps, steps.mask, final_obs, episodes), total_stats(stats)


def _start_groups(env: Env, policy: Policy, params: Tree, keys: Array, group_size: int) -> CollectorState:
    """All environments at the start of their episodes; those of a group, which have the same key, by one reset.

    So a prompt is read once per group, and its completions begin with copies of one KV cache. What lives on the host
    cannot be copied.
    """
    one_reset_for = 1 if env.host else group_size
    start = jax.vmap(partial(reset_env, env, policy, params))(keys[::one_reset_for])
    if one_reset_for > 1:
        start = jax.tree.map(lambda x: jnp.repeat(x, one_reset_for, 0), start)
    return jax.tree.map(collectives.shard_columns, start)


def _columns_per_device(num_envs: int, group_size: int) -> int:
    if num_envs % (shards := collectives.num_shards()):
        raise UserError(f"{num_envs} episodes do not divide over {shards} devices: make num_envs a multiple of them.")
    num_columns = num_envs // shards
    check_groups(num_columns, group_size, shards)
    return num_columns


def check_groups(num_envs: int, group_size: int, shards: int = 1) -> None:
    """Raise a UserError unless `num_envs`, on each of `shards` devices, are whole groups."""
    if num_envs % group_size:
        where = f" on each of {shards} devices" if shards > 1 else ""
        raise UserError(
            f"num_envs = {num_envs}{where} cannot be cut into groups of group_size = {group_size}: make it a multiple "
            "of that."
        )


def _run_episodes(
    env: Env, policy: Policy, params: Tree, start: CollectorState, keys: Callable[..., StepKeys]
) -> _EpisodesState:
    """Step all environments until the last episode is over; `keys(steps=...)` are the keys of these steps.

    Whether it is over is asked every `Machine.steps_per_question` steps; those after the end are padding. A memory that
    grows with the steps has room for all of them only towards the end of long episodes (`Machine.steps_of_room`).
    Random numbers are drawn for `Machine.steps_drawn` steps at a time, or for as many more as there are in a question.
    """
    one_step = jax.vmap(partial(_step_or_stay, env, policy, params))
    questions = -(-env.time_limit // machine().steps_per_question)
    steps_per_question = -(-env.time_limit // questions)  # as even as can be: at most questions - 1 steps too many
    num_rows = questions * steps_per_question
    num_drawn = min(num_rows, -(-min(num_rows, machine().steps_drawn) // steps_per_question) * steps_per_question)

    def draw(first: Array) -> _Drawn:
        of_steps = keys(steps=first + jnp.arange(num_drawn))
        return _Drawn(first, action_noise(policy, params, start, of_steps.action), of_steps.env)

    def step(drawn: _Drawn, state: _EpisodesState) -> _EpisodesState:
        runner, over, transition = one_step(state.runner, state.over, *_of_step(drawn, state.t))
        stored = partial(lax.dynamic_update_index_in_dim, index=state.t, axis=0)
        steps = jax.tree.map(stored, state.steps, storage.pack(transition))
        return _EpisodesState(state.t + 1, runner, over, steps)

    def step_within_limit(drawn: _Drawn, state: _EpisodesState) -> _EpisodesState:
        if num_rows == env.time_limit:
            return step(drawn, state)
        after = step(drawn, state._replace(over=state.over | (state.t >= env.time_limit)))
        return after._replace(over=jnp.where(state.t < env.time_limit, after.over, state.over))

    def until_question(drawn: _Drawn, state: _EpisodesState) -> _EpisodesState:
        if steps_per_question == 1:
            return step(drawn, state)
        return lax.fori_loop(0, steps_per_question, lambda _, state: step_within_limit(drawn, state), state)

    def draw_and_step(limit: int, state: _EpisodesState) -> _EpisodesState:
        unfinished = partial(_unfinished, jnp.minimum(limit, state.t + num_drawn))
        return lax.while_loop(unfinished, partial(until_question, draw(state.t)), state)

    over = jnp.zeros(len(jax.tree.leaves(start.obs)[0]), bool)
    zero, at_once = jnp.zeros((), jnp.int32), num_drawn == num_rows
    drawn = draw(zero) if at_once else jax.eval_shape(draw, zero)
    *_, row = jax.eval_shape(lambda x: one_step(start, over, *_of_step(x, x.first)), drawn)
    storage = row_storage(row)
    blank = _padding(jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape), x.dtype), row))
    end = _EpisodesState(zero, start, over, jax.vmap(storage.pack)(blank))
    if questions == 1:
        end = until_question(drawn, end)
    else:
        room = env.time_limit
        for limit in _growing_limits(policy, env.time_limit, steps_per_question):
            if policy.with_room:
                memory = policy.with_room(end.runner.memory, limit - room)
                end, room = end._replace(runner=end.runner._replace(memory=memory)), limit
            body = partial(until_question, drawn) if at_once else partial(draw_and_step, limit)
            end = lax.while_loop(partial(_unfinished, limit), body, end)
    return end._replace(steps=jax.tree.map(lambda x: x[: env.time_limit], storage.unpack(end.steps)))


def _of_step(drawn: _Drawn, t: Array) -> tuple[Tree, Array]:
    """The random numbers of one step: of the actions, and the keys of the environments."""
    return jax.tree.map(lambda x: x[t - drawn.first], (drawn.noise, drawn.keys))


def _growing_limits(policy: Policy, time_limit: int, steps_per_question: int) -> list[int]:
    """How far each of the loops of a rollout goes, in steps: to `time_limit`, unless the policy's memory grows."""
    parts = max(1, min(MOST_ROOMS, time_limit // machine().steps_of_room)) if policy.with_room else 1
    questions = -(-time_limit // steps_per_question)
    ends = [-(-questions * (i + 1) // parts) for i in range(parts)]
    return [min(questions * steps_per_question, time_limit) for questions in ends]


def _unfinished(limit: Array | int, state: _EpisodesState) -> Array:
    return (state.t < limit) & any_in_batch(~state.over)


def _step_or_stay(
    env: Env, policy: Policy, params: Tree, runner: CollectorState, over: Array, noise: Tree, key: Key
) -> tuple[CollectorState, Array, Transition]:
    """One step of one environment; after the end of its episode the environment stays and the step is padding."""
    moved, transition = step_env(env, policy, params, runner, noise, key)
    row = tree_where(over, _padding(transition), transition)
    return _stay_where_over(over, runner, moved), over | transition.last, row


def _stay_where_over(over: Array, runner: CollectorState, moved: CollectorState) -> CollectorState:
    """`runner` where its episode is over, else `moved`; the policy's memory is always that of `moved`.

    Nothing reads the memory of an episode that is over. Selecting it too would copy it at every step on every platform:
    of a language model, the whole KV cache at every token (benchmarks/LOG.md, "the first language loops").
    """
    selected = tree_where(over, runner._replace(memory=()), moved._replace(memory=()))
    return selected._replace(memory=moved.memory)


def _padding(steps: Transition) -> Transition:
    """These steps as padding, for rows after the end of an episode."""
    return steps._replace(
        reward=jnp.zeros_like(steps.reward),
        discount=jnp.zeros_like(steps.discount),
        last=jnp.ones_like(steps.last),
        mask=jnp.zeros_like(steps.mask),
    )


def _initial_memory(policy: Policy, start: CollectorState) -> Tree:
    """The memory that a rollout stores, `[B, ...]`: `()` for policies whose `evaluate` starts from the context.

    For a language model this saves the memory of one KV cache per column in every rollout, on every platform.
    """
    return () if policy.evaluates_from_context else start.memory


def _add_outcome(steps: Transition, outcome: Outcome, length: Array) -> Transition:
    """The steps with the reward of the outcome, `[B]`, added to the last step of each episode, and with those by step.

    Rewards by step are `[B, T]`.
    """
    last_step = length.astype(jnp.int32) - 1
    steps = steps._replace(reward=steps.reward.at[last_step, jnp.arange(len(length))].add(outcome.reward))
    if not outcome.step_rewards:
        return steps
    rewards = jax.tree.map(jnp.transpose, outcome.step_rewards)
    return steps._replace(reward=steps.reward + rewards.reward * steps.mask, step_end=rewards.end * steps.mask)

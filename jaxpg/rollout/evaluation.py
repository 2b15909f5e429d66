"""Whole episodes with fixed parameters: evaluate a policy, or record one episode to look at."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError, check_record
from jaxpg.rollout.collector import check_room, episode_numbers
from jaxpg.rollout.metrics import OF_ENV, outcome_metrics
from jaxpg.types import Actor, Array, Env, Key, Metrics, TimeStep, Tree
from jaxpg.user_input.domains import check_whole
from jaxpg.vectorize import any_in_batch, tree_where


class Evaluation(NamedTuple):
    """The results of whole episodes.

    returns: [episodes] float32, undiscounted sums of rewards.
    lengths: [episodes] int32, environment steps.
    metrics: further metrics, as means over the episodes (see `Env.outcome` and `Env.measure`).
    """

    returns: Array
    lengths: Array
    metrics: Metrics


class RecordedEpisode(NamedTuple):
    """One recorded episode, padded to T, the time limit or `max_steps`; entries from `length` on are meaningless.

    states, observations: leaves [T + 1, ...], the initial one first; the last one reached is at index `length`.
    actions: [T, ...].
    rewards: [T] float32.
    length: [] int32.
    """

    states: Tree
    observations: Tree
    actions: Array
    rewards: Array
    length: Array


class _Episode(NamedTuple):
    """An episode between two steps; `key` is the key of all its steps."""

    key: Key
    state: Tree
    obs: Tree
    memory: Tree


class _EvaluationState(NamedTuple):
    """What the loop over steps carries: steps taken, and per episode its state, whether it is running, and totals."""

    t: Array
    episodes: _Episode
    running: Array
    returns: Array
    lengths: Array


def evaluate(env: Env, actor: Actor, key: Key, *, episodes: int, greedy: bool, group_size: int = 1) -> Evaluation:
    """The returns and lengths of exactly `episodes` whole episodes, each from a fresh reset.

    The number of episodes is fixed, not the number of steps: among the first k episodes that *end*, short ones are
    over-represented. All episodes run side by side until the last has ended. The function is pure and works under vmap
    over seeds and under jit, without which every call compiles its loop again. Episode i depends on
    `jax.random.split(key, episodes)[i]` alone if `group_size` is 1, and `record_episode` with that key records it.

    Args:
        env: the environment; no episode is longer than its `time_limit`.
        actor: the policy to run.
        key: the source of all randomness.
        episodes: how many, at least one (static).
        greedy: take the mode of the policy instead of a sample (static).
        group_size: number of neighbouring episodes that share a start state (static), as answers to one prompt do.

    Raises:
        UserError: `env` or `actor` is no record of its kind; `episodes` is no integer from 1 on, or does not divide
            into groups; episodes may be longer than `actor.max_steps`.
    """
    check_record("evaluate", env, Env, 'envs.make("CartPole-v1")')
    check_record("evaluate", actor, Actor, "learner.actor(state)")
    return _evaluate(env, actor, _episode_keys(key, episodes, group_size), greedy=greedy, group_size=group_size)


def _episode_keys(key: Key, episodes: int, group_size: int) -> Key:
    """The keys `[episodes]` of an evaluation; its numbers are checked."""
    episodes, group_size = check_whole("episodes", episodes), check_whole("group_size", group_size)
    if episodes % group_size:
        raise UserError(f"{episodes} episodes do not divide into groups of {group_size}.")
    return jax.random.split(key, episodes)


def _evaluate(env: Env, actor: Actor, keys: Key, *, greedy: bool, group_size: int) -> Evaluation:
    """`evaluate`, by the keys of the episodes."""
    end = _run_episodes(env, actor, _reset_all(env, actor, keys, group_size), greedy)
    numbers = episode_numbers(env, end.episodes.state, ~end.running)
    metrics = {OF_ENV + name: x.mean() for name, x in numbers.items()}
    if env.outcome is None:
        return Evaluation(end.returns, end.lengths, metrics)
    outcome = jax.vmap(env.outcome)(end.episodes.state)
    metrics |= outcome_metrics(outcome)
    if env.measure:
        metrics |= env.measure(outcome, end.lengths, group_size)
    return Evaluation(end.returns + outcome.total(), end.lengths, metrics)


def evaluation_metrics(
    env: Env, actor: Actor, key: Key, *, episodes: int, greedy: bool = False, group_size: int = 1
) -> Metrics:
    """The metrics that an evaluation logs: the mean `return` and `length` of `evaluate`, and its `metrics`.

    Where the environment gives its reward for whole episodes, as for text, and actions are sampled, all metrics are
    measured a second time with one greedy episode per group, from its start state, and are named `greedy_...`.
    Arguments are those of `evaluate`.
    """
    keys = _episode_keys(key, episodes, group_size)
    firsts = jax.random.clone(keys)[::group_size]  # used a second time, which is meant

    def means(chosen: Key, **settings: Any) -> Metrics:
        result = _evaluate(env, actor, chosen, **settings)
        return {"return": result.returns.mean(), "length": result.lengths.mean(), **result.metrics}

    metrics = means(keys, greedy=greedy, group_size=group_size)
    if env.outcome is None or greedy:
        return metrics
    greedy_metrics = means(firsts, greedy=True, group_size=1)
    return metrics | {f"greedy_{name}": value for name, value in greedy_metrics.items()}


def record_episode(env: Env, actor: Actor, key: Key, *, greedy: bool, max_steps: int | None = None) -> RecordedEpisode:
    """Record one whole episode with all its states, for animations and analysis.

    Args:
        env: the environment.
        actor: the policy to run.
        key: the source of all randomness.
        greedy: take the mode of the policy instead of a sample (static).
        max_steps: record this many steps at most (static), None for all up to the time limit, for which there is memory
            then. An episode of this `length` may be longer.
    """
    steps = env.time_limit if max_steps is None else min(check_whole("max_steps", max_steps), env.time_limit)
    return _record(env, actor, _reset(env, actor, *jax.random.split(key)), greedy, steps)


def record_episodes(
    env: Env, actor: Actor, key: Key, *, episodes: int, greedy: bool, group_size: int = 1
) -> RecordedEpisode:
    """The episodes that `evaluate` runs with the same arguments, recorded, `[episodes, ...]`."""
    start = _reset_all(env, actor, _episode_keys(key, episodes, group_size), group_size)
    return jax.vmap(lambda first: _record(env, actor, first, greedy, env.time_limit))(start)


def _record(env: Env, actor: Actor, first: _Episode, greedy: bool, steps: int) -> RecordedEpisode:
    def step(carry: tuple[_Episode, Array], t: Array) -> tuple[tuple[_Episode, Array], Tree]:
        episode, running = carry
        following, action, timestep = _step(env, actor, episode, t, greedy)
        row = following.state, following.obs, action, timestep.reward, running
        return (following, running & jnp.logical_not(timestep.last)), row

    _, rows = lax.scan(step, (first, jnp.ones((), bool)), jnp.arange(steps))
    states, observations, actions, rewards, running = rows
    states, observations = jax.tree.map(
        lambda initial, later: jnp.concatenate([jnp.asarray(initial, later.dtype)[None], later]),
        (first.state, first.obs),
        (states, observations),
    )
    return RecordedEpisode(states, observations, actions, rewards.astype(jnp.float32), running.sum(dtype=jnp.int32))


def _reset_all(env: Env, actor: Actor, keys: Key, group_size: int) -> _Episode:
    """The episodes of an evaluation, by their keys, at their start, which the episodes of a group have in common."""
    halves = jax.vmap(jax.random.split)(keys)
    reset_keys, steps_keys = halves[:, 0], halves[:, 1]
    first_of_group = jnp.arange(len(keys)) // group_size * group_size
    return jax.vmap(partial(_reset, env, actor))(reset_keys[first_of_group], steps_keys)


def _reset(env: Env, actor: Actor, reset_key: Key, steps_key: Key) -> _Episode:
    """An episode at its start; `steps_key` is that of all its steps."""
    check_room(env, actor)
    state, obs = env.reset(reset_key)
    return _Episode(steps_key, state, obs, actor.start(env.initial_input(state, obs)))


def _step(env: Env, actor: Actor, episode: _Episode, t: Array, greedy: bool) -> tuple[_Episode, Array, TimeStep]:
    act_key, env_key = jax.random.split(jax.random.fold_in(episode.key, t))
    action, memory = actor.act(episode.memory, episode.obs, act_key, greedy)
    action = env.action_space.nearest(action)
    state, timestep = env.step(env_key, episode.state, action)
    return _Episode(episode.key, state, timestep.obs, memory), action, timestep


def _run_episodes(env: Env, actor: Actor, start: _Episode, greedy: bool) -> _EvaluationState:
    """Step all episodes, leaves `[episodes, ...]`, until the last has ended; only totals are kept."""

    def unfinished(carry: _EvaluationState) -> Array:
        return any_in_batch(carry.running) & (carry.t < env.time_limit)

    def step(carry: _EvaluationState) -> _EvaluationState:
        moved, _, timestep = jax.vmap(lambda episode: _step(env, actor, episode, carry.t, greedy))(carry.episodes)
        if env.outcome or env.episode_metrics:  # they are computed from the state at the end of the episode
            moved = moved._replace(state=jax.vmap(tree_where)(carry.running, moved.state, carry.episodes.state))
        reward = jnp.where(carry.running, timestep.reward, 0.0).astype(jnp.float32)
        return _EvaluationState(
            t=carry.t + 1,
            episodes=moved,
            running=carry.running & ~timestep.last,
            returns=carry.returns + reward,
            lengths=carry.lengths + carry.running,
        )

    number = start.key.shape[0]
    zeros = jnp.zeros(number, jnp.float32), jnp.zeros(number, jnp.int32)
    carry = _EvaluationState(jnp.zeros((), jnp.int32), start, jnp.ones(number, bool), *zeros)
    return lax.while_loop(unfinished, step, carry)

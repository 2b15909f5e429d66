"""Whole episodes with fixed parameters: how good a policy is, and one episode recorded to look at."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.rollout.metrics import outcome_metrics
from jaxpg.types import Actor, Array, Env, Key, Metrics, TimeStep, Tree
from jaxpg.vectorize import any_in_batch, tree_where


class Evaluation(NamedTuple):
    """What each whole episode came to.

    returns: [episodes] float32, undiscounted sums of rewards.
    lengths: [episodes] int32, environment steps.
    metrics: what else was measured, as means over the episodes (see types.Env, outcome and measure).
    """

    returns: Array
    lengths: Array
    metrics: Metrics


class RecordedEpisode(NamedTuple):
    """One recorded episode, padded to T = the environment's time limit; from `length` on the entries mean nothing.

    states, observations: leaves [T + 1, ...], the initial one first; the last one reached stands at `length`.
    actions: [T, ...].
    rewards: [T] float32.
    length: [] int32.
    """

    states: Tree
    observations: Tree
    actions: Array
    rewards: Array
    length: Array


class _EpisodeState(NamedTuple):
    """Where an episode stands between two steps."""

    key: Key
    state: Tree
    obs: Tree
    memory: Tree


_Carry = tuple[Array, _EpisodeState, Array, Evaluation]  # t, moments, running, sums


def _steps_key(key: Key) -> Key:
    return jax.random.split(key)[1]


def _reset(env: Env, actor: Actor, key: Key) -> _EpisodeState:
    state, obs = env.reset(jax.random.split(key)[0])
    return _EpisodeState(_steps_key(key), state, obs, actor.start(env.initial_input(state, obs)))


def _step(
    env: Env, actor: Actor, moment: _EpisodeState, t: Array, greedy: bool
) -> tuple[_EpisodeState, Array, TimeStep]:
    act_key, step_key = jax.random.split(jax.random.fold_in(moment.key, t))
    action, memory = actor.act(moment.memory, moment.obs, act_key, greedy)
    state, timestep = env.step(step_key, moment.state, action)
    return _EpisodeState(moment.key, state, timestep.obs, memory), action, timestep


def evaluate(env: Env, actor: Actor, key: Key, *, episodes: int, greedy: bool, group_size: int = 1) -> Evaluation:
    """The returns and lengths of exactly `episodes` whole episodes, each from a fresh reset.

    Counting episodes rather than steps keeps the average honest: among the first k episodes that *end*, short ones are
    over-represented. All run side by side until the last one has ended; only their sums are carried. Pure: works under
    jit and under vmap over seeds. Episode i depends on `jax.random.split(key, episodes)[i]` alone, and
    `record_episode` with that key records the very same episode.

    Args:
        env: the environment; no episode is longer than its `time_limit`.
        actor: the policy to run.
        key: the source of all randomness.
        episodes: how many, at least one (static).
        greedy: take the mode of the policy instead of a sample (static).
        group_size: this many neighbouring episodes begin alike (static), as answers to one prompt.

    Raises:
        UserError: if `episodes` is not positive, or does not divide into groups.
    """
    if episodes < 1:
        raise UserError(f"episodes must be at least 1, not {episodes}")
    if episodes % group_size:
        raise UserError(f"{episodes} episodes do not divide into groups of {group_size}.")
    keys = jax.random.split(key, episodes)
    leaders = jnp.arange(episodes) // group_size * group_size
    moments = jax.vmap(partial(_reset, env, actor))(keys[leaders])._replace(key=jax.vmap(_steps_key)(keys))

    def unfinished(carry: _Carry) -> Array:
        t, _, running, _ = carry
        return any_in_batch(running) & (t < env.time_limit)

    def step(carry: _Carry) -> _Carry:
        t, moments, running, sums = carry
        moved, _, timestep = jax.vmap(lambda m: _step(env, actor, m, t, greedy))(moments)
        if env.outcome:  # which reads the state at the end
            halted = jax.vmap(tree_where)(running, moved.state, moments.state)
            moved = moved._replace(state=halted)
        reward = jnp.where(running, timestep.reward, 0.0).astype(jnp.float32)
        sums = sums._replace(returns=sums.returns + reward, lengths=sums.lengths + running)
        return t + 1, moved, running & ~timestep.last, sums

    sums = Evaluation(jnp.zeros(episodes, jnp.float32), jnp.zeros(episodes, jnp.int32), {})
    start = jnp.zeros((), jnp.int32), moments, jnp.ones(episodes, bool), sums
    _, moments, _, sums = lax.while_loop(unfinished, step, start)
    if env.outcome is None:
        return sums
    outcome = jax.vmap(env.outcome)(moments.state)
    metrics = outcome_metrics(outcome)
    if env.measure:
        metrics |= env.measure(outcome, sums.lengths, group_size)
    return sums._replace(returns=sums.returns + outcome.reward, metrics=metrics)


def evaluation_metrics(
    env: Env, actor: Actor, key: Key, *, episodes: int, greedy: bool = False, group_size: int = 1
) -> Metrics:
    """What is logged of an evaluation: `return` and `length`, the means of `evaluate`, and what else it measured.

    Where whole episodes are judged, as text is, and sampled, the same again for one greedy episode of each group, under
    `greedy_...`. Arguments are those of `evaluate`.
    """

    def means(**settings: Any) -> Metrics:
        result = evaluate(env, actor, key, **settings)
        return {"return": result.returns.mean(), "length": result.lengths.mean(), **result.metrics}

    metrics = means(episodes=episodes, greedy=greedy, group_size=group_size)
    if env.outcome is None or greedy:
        return metrics
    mode = means(episodes=episodes // group_size, greedy=True)
    return metrics | {f"greedy_{name}": value for name, value in mode.items()}


def record_episode(env: Env, actor: Actor, key: Key, *, greedy: bool) -> RecordedEpisode:
    """Record one whole episode, for pictures and for close study.

    Args:
        env: the environment.
        actor: the policy to run.
        key: the source of all randomness.
        greedy: take the mode of the policy instead of a sample (static).
    """

    def step(carry: tuple[_EpisodeState, Array], t: Array) -> tuple[tuple[_EpisodeState, Array], Tree]:
        moment, running = carry
        following, action, timestep = _step(env, actor, moment, t, greedy)
        record = following.state, following.obs, action, timestep.reward, running
        return (following, running & ~timestep.last), record

    first = _reset(env, actor, key)
    _, record = lax.scan(step, (first, jnp.ones((), bool)), jnp.arange(env.time_limit))
    states, observations, actions, rewards, running = record
    states, observations = jax.tree.map(
        lambda initial, later: jnp.concatenate([jnp.asarray(initial, later.dtype)[None], later]),
        (first.state, first.obs),
        (states, observations),
    )
    return RecordedEpisode(states, observations, actions, rewards.astype(jnp.float32), running.sum(dtype=jnp.int32))

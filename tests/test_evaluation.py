"""Evaluation: whole episodes, their totals, and the same episodes recorded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments.build import build
from jaxpg.rollout import make_actor
from jaxpg.rollout.evaluation import evaluate, evaluation_metrics, record_episode, record_episodes
from jaxpg.types import Actor, Box, Discrete, Env, Outcome, TimeStep

LONGEST = 6


def countdown(*, time_limit: int = LONGEST) -> Env:
    """Lasts 1 to 6 steps, drawn at the reset; step t pays t + 1 if the action is t, else -100; 1000 after the end."""

    def reset(key):
        length = jax.random.randint(key, (), 1, LONGEST + 1)
        return (jnp.zeros((), jnp.int32), length), length.astype(jnp.float32)

    def step(key, state, action):
        t, length = state
        reward = jnp.where(t >= length, 1000.0, jnp.where(action == t, t + 1.0, -100.0))
        last = t + 1 == length
        return (t + 1, length), TimeStep(-(t + 1.0), reward, 1.0 - last, last)

    bound = np.full((), np.inf, np.float32)
    return Env("countdown", reset, step, Box(-bound, bound), Discrete(LONGEST), time_limit)


def endless() -> Env:
    env = countdown(time_limit=9)

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=jnp.ones(()), last=jnp.zeros((), bool))

    return env._replace(step=step)


# Counts its own steps, so the action is right only if the memory is carried from step to step and starts at zero.
COUNTER = Actor(start=lambda obs: jnp.zeros((), jnp.int32), act=lambda memory, obs, key, greedy: (memory, memory + 1))


def test_returns_and_lengths_are_those_of_whole_episodes():
    result = evaluate(countdown(), COUNTER, jax.random.key(0), episodes=64, greedy=False)
    assert result.returns.shape == result.lengths.shape == (64,)
    assert set(result.lengths.tolist()) == set(range(1, LONGEST + 1))
    np.testing.assert_array_equal(result.returns, result.lengths * (result.lengths + 1) / 2)


def test_the_episodes_of_a_group_begin_alike_and_differ_in_their_samples():
    guess = Actor(lambda obs: (), lambda memory, obs, key, greedy: (jax.random.randint(key, (), 0, LONGEST), memory))
    recorded = record_episodes(countdown(), guess, jax.random.key(0), episodes=32, greedy=False, group_size=4)
    lengths, actions = (np.asarray(x).reshape(8, 4, -1) for x in (recorded.length, recorded.actions))
    assert (lengths == lengths[:, :1]).all()
    assert len(np.unique(lengths)) > 1
    assert (actions[:, 1:] != actions[:, :1]).any(-1).all()


def test_greedy_episodes_begin_where_the_groups_of_sampled_ones_do():
    """The length of an episode is drawn by its reset alone."""
    env = countdown()._replace(outcome=lambda state: Outcome(jnp.zeros(()), {}))
    metrics = evaluation_metrics(env, COUNTER, jax.random.key(3), episodes=8, group_size=4)
    assert metrics["greedy_length"] == metrics["length"]


def test_greedy_episodes_are_not_measured_twice():
    """Where all are, no metric has a second one, which begins with greedy_."""
    env = countdown()._replace(outcome=lambda state: Outcome(jnp.zeros(()), {"right": jnp.ones(())}))
    metrics = evaluation_metrics(env, COUNTER, jax.random.key(3), episodes=8, greedy=True)
    assert set(metrics) == {"return", "length", "right"}


def test_an_episode_that_does_not_end_is_cut_at_the_time_limit():
    result = evaluate(endless(), COUNTER, jax.random.key(0), episodes=3, greedy=False)
    np.testing.assert_array_equal(result.lengths, 9)
    np.testing.assert_array_equal(result.returns, 9)


def test_it_stops_when_the_last_episode_has_ended():
    patient = countdown(time_limit=2**31 - 1)  # would take an hour
    assert evaluate(patient, COUNTER, jax.random.key(1), episodes=4, greedy=False).lengths.max() <= LONGEST


def test_vmap_over_seeds_equals_a_loop_and_nothing_is_traced_twice():
    keys, traces = jax.random.split(jax.random.key(2), 3), []

    @jax.jit
    def run(key):
        traces.append(None)
        return evaluate(countdown(), COUNTER, key, episodes=5, greedy=False)

    together = jax.vmap(run)(keys)
    for i, key in enumerate(keys):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], together), run(key))
    assert len(traces) == 1


def cart_pole_actor() -> Actor:
    def act(memory, obs, key, greedy):
        leaning = (obs[2] + 0.3 * obs[3] > 0).astype(jnp.int32)
        return (leaning if greedy else jnp.where(jax.random.bernoulli(key, 0.5), leaning, 1 - leaning)), memory

    return Actor(lambda obs: (), act)


@pytest.mark.parametrize("greedy", [False, True])
def test_record_episode_records_the_episode_that_evaluate_counts(greedy):
    env, actor, key = envs.make("CartPole-v1", max_steps_in_episode=60), cart_pole_actor(), jax.random.key(3)
    result = jax.jit(lambda key: evaluate(env, actor, key, episodes=3, greedy=greedy))(key)
    record = jax.jit(jax.vmap(lambda key: record_episode(env, actor, key, greedy=greedy)))(jax.random.split(key, 3))
    np.testing.assert_array_equal(record.length, result.lengths)
    for rewards, length, total in zip(record.rewards, record.length, result.returns, strict=True):
        np.testing.assert_allclose(rewards[:length].sum(), total, rtol=1e-6)
    assert (result.lengths == 60).all() if greedy else len(set(result.lengths.tolist())) > 1


def test_a_recorded_episode_has_every_observation_and_its_successor():
    env = envs.make("CartPole-v1", max_steps_in_episode=20)
    episode = record_episode(env, cart_pole_actor(), jax.random.key(4), greedy=True)
    assert episode.observations.shape == (21, 4)
    assert episode.actions.shape == episode.rewards.shape == (20,)
    for t in range(int(episode.length)):
        state = jax.tree.map(lambda x, t=t: x[t], episode.states)
        np.testing.assert_allclose(episode.observations[t], [state.x, state.x_dot, state.theta, state.theta_dot])
        _, timestep = env.step(jax.random.key(0), state, episode.actions[t])  # CartPole steps without chance
        np.testing.assert_allclose(timestep.obs, episode.observations[t + 1], atol=1e-6)


def test_every_step_has_randomness_of_its_own():
    env = endless()

    def step(key, state, action):
        state, timestep = env.step(key, state, action)
        return state, timestep._replace(reward=jax.random.uniform(key))

    actor = Actor(start=lambda obs: (), act=lambda memory, obs, key, greedy: (jax.random.uniform(key), memory))
    episode = record_episode(env._replace(step=step), actor, jax.random.key(5), greedy=False)
    assert len({*episode.actions.tolist(), *episode.rewards.tolist()}) == 18


def test_an_actor_takes_the_mode_or_samples():
    actor = make_actor(
        tiny.softmax_policy(jnp.log(jnp.array([[0.3, 0.5, 0.2]]))), jnp.log(jnp.array([[0.3, 0.5, 0.2]]))
    )
    keys = jax.random.split(jax.random.key(6), 2000)
    greedy, sampled = (
        np.bincount(jax.vmap(lambda key, g=g: actor.act((), jnp.ones(1), key, g)[0])(keys), minlength=3)
        for g in (True, False)
    )
    np.testing.assert_array_equal(greedy, [0, 2000, 0])
    np.testing.assert_allclose(sampled / 2000, [0.3, 0.5, 0.2], atol=0.05)


def test_a_config_sets_whether_evaluations_are_greedy():
    """An untrained policy on CartPole: its samples balance longer than its mode."""
    key = jax.random.key(0)

    def measured(greedy):
        own = {"evaluation_greedy": greedy, "evaluation_episodes": 16}
        setup = build(configs.resolve_config("cartpole", "a2c", own))
        state = setup.learner.init(key)
        by_hand = evaluation_metrics(setup.env, setup.learner.actor(state), key, episodes=16, greedy=greedy)
        assert setup.evaluate(state, key) == by_hand
        played = evaluate(setup.env, setup.learner.actor(state), key, episodes=16, greedy=greedy)
        assert by_hand["return"] == played.returns.mean()
        assert by_hand["length"] == played.lengths.mean()
        return by_hand["return"]

    assert measured(False) > measured(True) + 3


def test_zero_episodes_are_refused():
    with pytest.raises(UserError, match="at least 1, not 0"):
        evaluate(countdown(), COUNTER, jax.random.key(0), episodes=0, greedy=False)


@pytest.mark.parametrize(("task", "algorithm"), [("cliff_walking", "sarsa"), ("sort", "grpo"), ("sort", "sft")])
def test_a_run_draws_no_random_number_twice(task, algorithm):
    """By jax's own account; test_contracts.py has the learners of the table."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.debug_key_reuse(True):
        experiment = build(configs.resolve_config(task, algorithm))
        state = jax.eval_shape(jax.jit(experiment.learner.init), key)
        jax.eval_shape(jax.jit(experiment.learner.step), state, key)
        jax.eval_shape(jax.jit(experiment.evaluate), state, key)

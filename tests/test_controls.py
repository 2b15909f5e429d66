"""Negative controls: break one thing that matters, and see that the outcome moves by more than it varies over seeds.

They show that learning on these tasks would notice the mistake. Each is small; benchmarks/ has them at full size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax

from jaxpg import envs, ladder, networks
from jaxpg.policy_gradient import policy_gradient
from jaxpg.types import Box, Discrete, Env, TimeStep

pytestmark = pytest.mark.learning
SEEDS, GAMMA = 6, 0.9


def over_seeds(env, network, algorithm, iterations, outcome, seeds=SEEDS):
    """`outcome(state, metrics)` of every seed, after training."""
    learner = policy_gradient(env, *network, algorithm)

    def run(key):
        init_key, run_key = jax.random.split(key)
        state, metrics = lax.scan(learner.step, learner.init(init_key), jax.random.split(run_key, iterations))
        return outcome(state, metrics)

    keys = jax.random.split(jax.random.key(0), seeds)
    return np.asarray(jax.jit(lambda keys: lax.map(run, keys))(keys))


def with_credit(algorithm, change):
    """The algorithm with its credit computed from changed steps."""
    credit = algorithm.credit

    def changed(steps, *args, **kwargs):
        return credit(change(steps), *args, **kwargs)

    return algorithm._replace(credit=changed)


def constant_reward(steps: int) -> Env:
    """Reward 1 at every step, nothing to see, and a time-out after so many: V is 1/(1 - gamma) all the same."""

    def step(key, time, action):
        return time + 1, TimeStep(jnp.ones(1), jnp.ones(()), jnp.ones(()), time + 1 >= steps)

    def reset(key):
        return jnp.zeros((), jnp.int32), jnp.ones(1)

    return Env("constant", reset, step, Box(np.zeros(1, np.float32), np.ones(1, np.float32)), Discrete(2), steps)


def test_time_outs_that_count_as_terminations_lose_the_future():
    env = constant_reward(5)
    network = tiny.softmax_policy(jnp.zeros((1, 2))), tiny.value_table(jnp.zeros(1))
    algorithm = ladder.a2c(num_envs=4, num_steps=16, gamma=GAMMA, gae_lambda=0.95, learning_rate=0.1)
    broken = with_credit(algorithm, lambda steps: steps._replace(discount=1.0 - steps.last))
    right, wrong = (
        over_seeds(env, network, a, 300, lambda state, metrics: state.params.critic[0]) for a in (algorithm, broken)
    )
    np.testing.assert_allclose(right, 1 / (1 - GAMMA), rtol=0.05)
    assert wrong.max() < 0.6 * right.min()


def test_ends_that_are_noted_one_step_late_give_wrong_values():
    """Of an episode of two steps with the reward at its end, V(start) = gamma: the error leaks across episodes."""
    env = envs.make("probe-discount")
    network = networks.mlp(env, hidden=(8,))
    algorithm = ladder.a2c(num_envs=8, num_steps=16, gamma=GAMMA, gae_lambda=0.95, learning_rate=0.02)

    def late(steps):
        return steps._replace(last=jnp.roll(steps.last, 1, 0), discount=jnp.roll(steps.discount, 1, 0))

    def value(state, metrics):
        return network[1].values(state.params, tiny.resting(jnp.zeros((1, 1))))[0][0, 0]

    right, wrong = (over_seeds(env, network, a, 200, value) for a in (algorithm, with_credit(algorithm, late)))
    np.testing.assert_allclose(right, GAMMA, atol=0.05)
    assert (np.abs(wrong - GAMMA) > 0.3).all()


def test_groups_that_are_shuffled_compare_what_cannot_be_compared():
    """Two starts, one of which is worth a hundred times what the right action is worth."""
    env = envs.make("probe-policy")

    def step(key, state, action):
        after, timestep = env.step(key, state, action)
        return after, timestep._replace(reward=timestep.reward + 100.0 * state.sign)

    uneven = env._replace(step=step)
    policy, _ = networks.mlp(env, hidden=(8,))
    algorithm = ladder.grpo(num_envs=64, group_size=8, kl=None, learning_rate=0.01)
    order = jnp.arange(64).reshape(8, 8).T.reshape(-1)  # each new group has a member of every old one

    def shuffled(steps, *args, **kwargs):
        credit = algorithm.credit(steps._replace(reward=steps.reward[:, order]), *args, **kwargs)
        return credit._replace(advantage=credit.advantage[:, order.argsort()])

    def right_actions(state, metrics):
        logits = policy.act(state.params.policy, (), jnp.array([[-1.0], [1.0]]))[0].logits
        return jax.nn.softmax(logits)[jnp.arange(2), jnp.arange(2)].mean()

    right, wrong = (
        over_seeds(uneven, (policy, None), a, 25, right_actions)
        for a in (algorithm, algorithm._replace(credit=shuffled))
    )
    assert right.min() > 0.95
    assert wrong.mean() < 0.75


@tiny.LONG
@pytest.mark.full
def test_many_passes_without_the_clip_ruin_what_they_learn_from():
    env = envs.make("CartPole-v1")
    network = networks.mlp(env, hidden=(32, 32))
    settings = {"num_envs": 8, "num_steps": 128, "epochs": 20, "learning_rate": 1e-3, "max_grad_norm": None}

    def late_return(state, metrics):
        return jnp.nanmean(metrics["return"][-15:])

    seeds = 3 * SEEDS  # without the clip some runs survive and some do not
    right, wrong = (
        over_seeds(env, network, ladder.ppo(clip=clip, **settings), 50, late_return, seeds) for clip in (0.2, np.inf)
    )
    error = np.sqrt((right.var(ddof=1) + wrong.var(ddof=1)) / seeds)
    assert right.mean() > 380
    assert right.mean() - wrong.mean() > 3 * error

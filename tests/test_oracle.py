"""Each rung's gradient, averaged over many episodes, against the exact one of an MDP whose P and R are known.

The gradients are the learner's own: the change of the parameters in one step of plain gradient descent with learning
rate 1. The oracle is `jax.grad` of exact policy evaluation over the finite horizon. The textbook gradient weights the
state at time t by gamma^t, and only plain REINFORCE keeps that factor (its psi is G_0). All other rungs drop it: they
are compared with the sum over time without it, computed exactly, which equals the textbook gradient for gamma = 1.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import envs, ladder, update
from jaxpg.objectives import loss_weights
from jaxpg.policy_gradient import policy_gradient

STATES, ACTIONS, HORIZON = 4, 2, 5
GAMMA = 0.8
NUM_ENVS, BATCHES = 4, 20_000
LOGITS = jax.random.normal(jax.random.key(1), (STATES, ACTIONS))
WRONG_CRITIC = jnp.array([3.0, -2.0, 4.0, 0.0])  # 0 where the episode is over, as for any critic

ENDING = envs.random_mdp(jax.random.key(0), STATES, ACTIONS)._replace(start=jnp.array([0.7, 0.2, 0.1, 0.0]))
ENDING = ENDING._replace(R=jnp.where(ENDING.terminal[:, None, None], 0.0, ENDING.R + 2.0))


def _endless() -> envs.MDP:
    """ENDING without its last state: every episode times out, so all have the same length."""
    keep = slice(0, STATES - 1)
    P = ENDING.P[keep, :, keep]
    return envs.MDP(P / P.sum(-1, keepdims=True), ENDING.R[keep, :, keep], ENDING.start[keep], ENDING.terminal[keep])


def _forward() -> envs.MDP:
    """ENDING with moves to later states only: every episode terminates before the time limit."""
    later = jnp.triu(jnp.ones((STATES, STATES)), 1)[:, None, :]
    P = jnp.where(ENDING.terminal[:, None, None], ENDING.P, ENDING.P * later)
    return ENDING._replace(P=P / P.sum(-1, keepdims=True))


ENDLESS, FORWARD = _endless(), _forward()


def exact(mdp, gamma, *, bootstrap=None, lambda_=1.0, restart=False):
    """sum_t sum_s d_t(s) sum_a grad pi(a|s) q_t(s, a), the gradient that every rung but the first estimates, `[S, A]`.

    d_t is the distribution of states at time t; with `restart`, that of an environment which resets when its episode
    ends. q_t is the expected lambda-return over the remaining horizon, with `bootstrap` `[S]` in place of V.
    """
    states = len(mdp.terminal)
    logits = LOGITS[:states]
    pi = jax.nn.softmax(logits)
    v_critic = jnp.zeros(states) if bootstrap is None else bootstrap
    visits, visited = jnp.where(mdp.terminal, 0.0, mdp.start), []
    for _ in range(HORIZON):
        visited.append(visits)
        after = jnp.einsum("s,sa,sax->x", visits, pi, mdp.P)
        ended = jnp.where(mdp.terminal, after, 0.0).sum()
        visits = jnp.where(mdp.terminal, 0.0, after) + (ended * mdp.start if restart else 0.0)
    v, scores = v_critic, []
    for _ in range(HORIZON):
        q = envs.action_values(mdp, (1 - lambda_) * v_critic + lambda_ * v, gamma)
        v = (pi * q).sum(-1)
        scores.append(q)
    weight = sum(d[:, None] * q for d, q in zip(visited, reversed(scores), strict=True))
    return jax.grad(lambda logits: (weight * jax.nn.softmax(logits)).sum())(logits)


def true_gradient(mdp, gamma, objective=envs.expected_return):
    logits = LOGITS[: len(mdp.terminal)]
    return jax.grad(lambda logits: objective(mdp, jax.nn.softmax(logits), gamma, HORIZON))(logits)


def gradients(algorithm, mdp, *, critic=None, baseline=0.0, batches=BATCHES):
    """The change of the logits in one step of gradient descent with learning rate 1, `[batches, S, A]`."""
    states = len(mdp.terminal)
    env = envs.as_env(mdp, HORIZON, "oracle")
    critic = tiny.value_table(jnp.zeros(states) if critic is None else critic)
    algorithm = algorithm._replace(optimizer=update.sgd, learning_rate=partial(update.constant, value=1.0))
    learner = policy_gradient(env, tiny.softmax_policy(LOGITS[:states]), critic, algorithm)

    def change(key):
        init_key, step_key = jax.random.split(key)
        before = learner.init(init_key)._replace(baseline=jnp.float32(baseline))
        after, _ = learner.step(before, step_key)
        return after.params.policy - before.params.policy

    return np.asarray(tiny.jit(jax.vmap(change))(jax.random.split(jax.random.key(2), batches)), np.float64)


def distance(samples, expected):
    """The largest difference between the mean of the samples and `expected`, in standard errors of the mean."""
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    varies = error > 0  # the logits of a terminal state never change
    difference = np.abs(samples.mean(0) - np.asarray(expected))
    assert (difference[~varies] == 0).all()
    return (difference[varies] / error[varies]).max()


def close(samples, expected):
    return distance(samples, expected) < 4.5


def far(samples, expected):
    return distance(samples, expected) > 10


def values(mdp, gamma):
    return envs.state_values(mdp, jax.nn.softmax(LOGITS[: len(mdp.terminal)]), gamma)


EPISODES = {"num_envs": NUM_ENVS, "gamma": GAMMA}
SEGMENT = EPISODES | {"num_steps": HORIZON}
ONE_STEP = {"epochs": 1, "num_minibatches": 1, "max_grad_norm": None, "kl": None, "group_size": NUM_ENVS, **EPISODES}
UNDISCOUNTED_STATES = exact(ENDING, GAMMA)


@pytest.mark.parametrize("mdp", [ENDING, ENDLESS], ids=["ending", "endless"])
def test_without_discount_the_sum_over_time_is_the_gradient_of_exact_evaluation(mdp):
    np.testing.assert_allclose(exact(mdp, 1.0), true_gradient(mdp, 1.0), rtol=1e-5, atol=1e-6)
    assert np.abs(exact(mdp, GAMMA) - true_gradient(mdp, GAMMA)).max() > 0.1


def test_reinforce_is_the_gradient_of_the_discounted_return():
    samples = gradients(ladder.reinforce(**EPISODES), ENDING)
    assert close(samples, true_gradient(ENDING, GAMMA))
    assert far(samples, UNDISCOUNTED_STATES)


def test_reward_to_go_drops_the_discounted_weighting_of_states():
    samples = gradients(ladder.reinforce_to_go(**EPISODES), ENDING)
    assert close(samples, UNDISCOUNTED_STATES)
    assert far(samples, true_gradient(ENDING, GAMMA))


def test_without_discount_both_are_the_gradient_of_the_return():
    for rung in (ladder.reinforce, ladder.reinforce_to_go):
        assert close(gradients(rung(num_envs=NUM_ENVS, gamma=1.0), ENDING), true_gradient(ENDING, 1.0))


def test_a_running_baseline_is_unbiased():
    assert close(
        gradients(ladder.reinforce_baseline(baseline_kind="running", **EPISODES), ENDING, baseline=1.7),
        UNDISCOUNTED_STATES,
    )


def test_a_batch_baseline_is_biased_by_the_share_of_each_episode_in_the_mean():
    """With N episodes of T steps, E[b grad log pi] = grad E[sum_t G_t]/(NT): the episode's own part in the mean."""

    def summed_returns(mdp, pi, gamma, horizon):
        visits, total = mdp.start, 0.0
        for t in range(horizon):
            total += visits @ envs.state_values(mdp, pi, gamma, horizon - t)
            visits = jnp.einsum("s,sa,sax->x", visits, pi, mdp.P)
        return total

    bias = -true_gradient(ENDLESS, GAMMA, summed_returns) / (NUM_ENVS * HORIZON)
    samples = gradients(ladder.reinforce_baseline(baseline_kind="batch", **EPISODES), ENDLESS)
    assert close(samples, exact(ENDLESS, GAMMA) + bias)
    assert far(samples, exact(ENDLESS, GAMMA))


@pytest.mark.parametrize("critic", ["exact", "wrong"])
def test_actor_critic_mc_is_unbiased_up_to_the_critic_at_time_outs(critic):
    """A time-out bootstraps from the critic, so the exact critic gives the gradient without a time limit."""
    critic = values(ENDING, GAMMA) if critic == "exact" else WRONG_CRITIC
    samples = gradients(ladder.actor_critic_mc(**EPISODES), ENDING, critic=critic)
    assert close(samples, exact(ENDING, GAMMA, bootstrap=critic))
    assert far(samples, UNDISCOUNTED_STATES)


def test_actor_critic_td_uses_the_critic_only_at_the_end_of_its_segment():
    algorithm = ladder.actor_critic_td(**SEGMENT)
    samples = gradients(algorithm, ENDING, critic=WRONG_CRITIC)
    assert close(samples, exact(ENDING, GAMMA, bootstrap=WRONG_CRITIC, restart=True) / HORIZON)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_a2c_is_unbiased_with_the_exact_critic_for_every_lambda(lambda_):
    v = values(ENDING, GAMMA)
    samples = gradients(ladder.a2c(gae_lambda=lambda_, **SEGMENT), ENDING, critic=v)
    assert close(samples, exact(ENDING, GAMMA, bootstrap=v, restart=True) / HORIZON)


@pytest.mark.parametrize("lambda_", [0.0, 0.6])
def test_a2c_with_a_wrong_critic_has_the_predicted_bias(lambda_):
    v = values(ENDING, GAMMA)
    samples = gradients(ladder.a2c(gae_lambda=lambda_, **SEGMENT), ENDING, critic=WRONG_CRITIC)
    assert close(samples, exact(ENDING, GAMMA, bootstrap=WRONG_CRITIC, lambda_=lambda_, restart=True) / HORIZON)
    assert far(samples, exact(ENDING, GAMMA, bootstrap=v, restart=True) / HORIZON)


def test_a2c_over_whole_episodes_is_unbiased_with_any_critic_at_lambda_one():
    """On episodes that terminate: at time-outs the critic is used."""
    whole = ladder.reinforce(**EPISODES)
    for lambda_, verdict in ((1.0, close), (0.5, far)):
        algorithm = ladder.a2c(gae_lambda=lambda_, **SEGMENT)
        algorithm = algorithm._replace(collector=whole.collector, loss_weights=whole.loss_weights)
        assert verdict(gradients(algorithm, FORWARD, critic=WRONG_CRITIC), exact(FORWARD, GAMMA))


def test_rloo_is_unbiased():
    """All episodes have HORIZON steps, the length that the mean over an episode divides by."""
    samples = gradients(ladder.rloo(**ONE_STEP), ENDLESS)
    assert close(samples, true_gradient(ENDLESS, GAMMA) / HORIZON)


def test_a_mean_over_each_episode_is_not_the_gradient_where_lengths_differ():
    samples = gradients(ladder.rloo(**ONE_STEP), ENDING)
    assert far(samples, true_gradient(ENDING, GAMMA) / HORIZON)
    summed = ladder.rloo(**ONE_STEP)._replace(loss_weights=partial(loss_weights.per_episode_over, length=1))
    assert close(gradients(summed, ENDING), true_gradient(ENDING, GAMMA))


def test_dr_grpo_is_the_gradient_up_to_two_constants():
    samples = gradients(ladder.dr_grpo(max_length=HORIZON, **ONE_STEP), ENDING)
    assert close(samples, true_gradient(ENDING, GAMMA) * (NUM_ENVS - 1) / NUM_ENVS / HORIZON)
    assert far(samples, true_gradient(ENDING, GAMMA) / HORIZON)


def test_grpo_is_biased_since_its_std_depends_on_the_episodes():
    """No constant factor makes it the gradient: its direction differs."""
    algorithm = ladder.grpo(**(ONE_STEP | {"group_size": 2}))
    samples, truth = gradients(algorithm, ENDLESS, batches=2 * BATCHES), np.asarray(true_gradient(ENDLESS, GAMMA))
    best = (samples.mean(0) * truth).sum() / (truth**2).sum()
    assert far(samples, best * truth)


def test_variance_falls_up_the_ladder():
    """For psi = G_0, G_t, G_t - mean, G_t - V(s_t)."""
    plain = {"num_envs": NUM_ENVS, "gamma": 1.0}
    mean = float(envs.expected_return(FORWARD, jax.nn.softmax(LOGITS), 1.0)) / 2
    rungs = [
        gradients(ladder.reinforce(**plain), FORWARD),
        gradients(ladder.reinforce_to_go(**plain), FORWARD),
        gradients(ladder.reinforce_baseline(baseline_kind="running", **plain), FORWARD, baseline=mean),
        gradients(ladder.actor_critic_mc(**plain), FORWARD, critic=values(FORWARD, 1.0)),
    ]
    assert all(close(samples, true_gradient(FORWARD, 1.0)) for samples in rungs)
    spread = [samples.var(0).sum() for samples in rungs]
    print(spread)
    for higher, lower in itertools.pairwise(spread):
        assert lower < 0.9 * higher

"""Targets and losses of action values against float64 loops, and what each switch reduces to."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpg import values
from jaxpg.rollout.successors import bootstraps_at
from jaxpg.types import Rollout, Transition
from jaxpg.values import targets
from jaxpg.values.deep_q import Parts
from jaxpg.values.q_networks import DuelingHead, QNetwork
from jaxpg.values.replay import NStep
from jaxpg.values.replay_learning import td_target
from jaxpg.values.rollout_learning import lambda_targets

TABLE = QNetwork(init=lambda key: None, returns=lambda params, obs: params[obs])
"""Estimates `[S, A, N]` as parameters, states as observations."""


def parts(algorithm: values.DeepQ) -> Parts:
    return Parts(SimpleNamespace(), TABLE, algorithm, None)


@pytest.mark.parametrize("name", ["dqn", "double_dqn"])
def test_targets_are_those_of_the_papers(name):
    """The online and the target network disagree about the best action, so one cannot pass for the other."""
    rng = np.random.default_rng(0)
    online, target = rng.normal(size=(2, 6, 3, 1))
    state, reward, factor = rng.integers(6, size=9), rng.normal(size=9), rng.choice([0.0, 0.9, 0.81], size=9)
    batch = NStep(None, None, jnp.asarray(reward), jnp.asarray(factor), jnp.asarray(state))
    found = tiny.jit(partial(td_target, parts(values.ALGORITHMS[name]())))(
        jnp.asarray(online), jnp.asarray(target), batch
    )
    chosen = (online if name == "double_dqn" else target)[state, :, 0].argmax(1)
    expected = reward + factor * target[state, chosen, 0]
    assert (online.argmax(1) != target.argmax(1)).any()
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5)


def slow_quantile_loss(prediction: np.ndarray, target: np.ndarray, threshold: float) -> float:
    """Algorithm 1 of Dabney et al. 2018 for one row."""
    total, n = 0.0, len(prediction)
    for i, theta in enumerate(prediction):
        tau = (2 * i + 1) / (2 * n)
        for sample in target:
            u = sample - theta
            huber = 0.5 * u**2 if abs(u) <= threshold else threshold * (abs(u) - 0.5 * threshold)
            total += abs(tau - (u < 0)) * huber / threshold / len(target)
    return total


@pytest.mark.parametrize("threshold", [1.0, 0.3])
def test_the_quantile_loss_is_that_of_a_loop(threshold):
    rng = np.random.default_rng(0)
    prediction, target = rng.normal(size=(4, 5)), 2 * rng.normal(size=(4, 7))
    loss = tiny.jit(partial(targets.quantile_huber_loss, threshold=threshold))
    found = loss(jnp.asarray(prediction), jnp.asarray(target))
    expected = [slow_quantile_loss(p, t, threshold) for p, t in zip(prediction, target, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_one_quantile_is_half_of_the_huber_loss():
    prediction, target = jnp.zeros((5, 1)), jnp.array([[-3.0], [-0.5], [0.0], [0.7], [9.0]])
    one, huber = tiny.jit(lambda *x: (targets.quantile_huber_loss(*x), targets.huber_loss(*x)))(prediction, target)
    np.testing.assert_allclose(one, 0.5 * huber, rtol=1e-6)
    np.testing.assert_allclose(2 * one, [2.5, 0.125, 0, 0.245, 8.5], rtol=1e-6)


def test_minimising_the_quantile_loss_finds_the_quantiles():
    samples = jnp.asarray(np.random.default_rng(0).exponential(size=(1, 1001)))

    def descend(theta, _):
        gradient = jax.grad(lambda x: targets.quantile_huber_loss(x, samples, threshold=1e-3)[0])(theta)
        return theta - 0.02 * gradient, None

    theta, _ = tiny.jit(lambda x: jax.lax.scan(descend, x, None, 2000))(jnp.zeros((1, 4)))
    np.testing.assert_allclose(theta[0], np.quantile(samples, [1 / 8, 3 / 8, 5 / 8, 7 / 8]), atol=0.03)


def test_a_dueling_head_has_advantages_of_mean_zero():
    """A constant added to every advantage changes nothing: equation 9 of Wang et al. 2016."""
    head, features = DuelingHead(3, quantiles=2), jax.random.normal(jax.random.key(0), (4, 5))
    q, params = tiny.jit(head.init_with_output)(jax.random.key(1), features)
    apply = tiny.jit(head.apply)
    assert q.shape == (4, 3, 2)
    assert np.ptp(np.asarray(q), axis=1).min() > 0.01
    advantage_bias = params["params"]["Dense_3"]["bias"]
    params["params"]["Dense_3"]["bias"] = advantage_bias + 10.0
    np.testing.assert_allclose(apply(params, features), q, rtol=1e-4, atol=1e-4)
    params["params"]["Dense_1"]["bias"] += 10.0
    np.testing.assert_allclose(apply(params, features), q + 10.0, rtol=1e-4, atol=1e-4)


def test_the_target_network_moves_when_it_is_due():
    old, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
    moved = [targets.move_target(old, new, jnp.int32(i), period=3, rate=0.25)["w"][0] for i in range(1, 7)]
    np.testing.assert_array_equal(moved, [0, 0, 0.25, 0, 0, 0.25])


def test_epsilon_greedy_chooses_the_best_and_explores():
    q = jnp.array([[0.0, 3.0, 3.0, -1.0]])

    @tiny.jit
    def look(epsilon):
        policy = values.epsilon_greedy(q, epsilon)
        return jax.nn.softmax(policy.logits), policy.mode(), policy.entropy()

    np.testing.assert_allclose(look(0.2)[0], [[0.05, 0.85, 0.05, 0.05]], rtol=1e-5)
    for epsilon in (0.0, 0.5, 1.0):  # the greedy action stays the mode
        assert look(epsilon)[1] == 1
        assert np.isfinite(look(epsilon)[2]).all()


def test_epsilon_greedy_explores_what_is_allowed():
    q = jnp.array([[0.0, 3.0, 2.0, -1.0], [-9.0, -8.0, -7.0, -6.0]])
    allowed = jnp.array([[True, False, True, True], [True, False, False, False]])
    policy = values.epsilon_greedy(q, 0.3, allowed)
    np.testing.assert_allclose(jnp.exp(policy.logits), [[0.1, 0, 0.8, 0.1], [1, 0, 0, 0]], rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), [2, 0])
    assert np.isfinite(policy.entropy()).all()


@pytest.mark.parametrize("name", ["dqn", "double_dqn"])
def test_targets_take_an_allowed_action(name):
    """In a state where none is, after the end of a game, any: its discount is 0."""
    rng = np.random.default_rng(1)
    online, target = rng.normal(size=(2, 6, 3, 1))
    mask = rng.random((6, 3)) < 0.5
    mask[0] = False
    network = TABLE._replace(action_mask=lambda obs: jnp.asarray(mask)[obs])
    batch = NStep(None, None, jnp.zeros(6), jnp.ones(6), jnp.arange(6))
    found = td_target(
        Parts(SimpleNamespace(), network, values.ALGORITHMS[name](), None),
        jnp.asarray(online),
        jnp.asarray(target),
        batch,
    )
    by = online if name == "double_dqn" else target
    for s in range(6):
        allowed = [a for a in range(3) if mask[s, a] or not mask[s].any()]
        best = max(allowed, key=lambda a: by[s, a, 0])
        np.testing.assert_allclose(found[s, 0], target[s, best, 0], rtol=1e-6)
    of_best = network.values(jnp.asarray(target), jnp.arange(6)).max(-1)  # as PQN's targets read it
    expected = [max(target[s, a, 0] for a in range(3) if mask[s, a] or not mask[s].any()) for s in range(6)]
    np.testing.assert_allclose(of_best, expected, rtol=1e-6)


def slow_lambda_targets(q, obs, final_q, reward, discount, last, gamma, lambda_):
    """One column, backwards in Python; `final_q` is max Q of the true successor where the column breaks off."""
    following, targets_ = 0.0, []
    for t in reversed(range(len(reward))):
        broken = t == len(reward) - 1 or (last[t] and discount[t])
        value = final_q[t] if broken else q[obs[t + 1]].max() if t + 1 < len(obs) else 0.0
        mixed = value if last[t] or t == len(reward) - 1 else (1 - lambda_) * value + lambda_ * following
        following = reward[t] + gamma * discount[t] * mixed
        targets_.append(following)
    return targets_[::-1]


def test_lambda_returns_of_q_are_those_of_a_loop():
    rng = np.random.default_rng(3)
    steps, columns, gamma, lambda_ = 9, 4, 0.9, 0.7
    q = rng.normal(size=(20, 3))
    obs = rng.integers(20, size=(steps, columns))
    last = rng.random((steps, columns)) < 0.4
    discount = np.where(last & (rng.random((steps, columns)) < 0.5), 0.0, 1.0)
    reward = rng.normal(size=(steps, columns))
    successor = rng.integers(20, size=(steps, columns))
    zeros = jnp.zeros((steps, columns))
    transitions = Transition(
        jnp.asarray(obs), zeros, zeros, jnp.asarray(reward), jnp.asarray(discount), jnp.asarray(last), zeros + 1
    )
    breaks = np.asarray(bootstraps_at(transitions))
    final = np.zeros((steps, columns), int)
    for b in range(columns):
        kept = successor[breaks[:, b], b]
        final[: len(kept), b] = kept
    algorithm = values.pqn(gamma=gamma)
    rollout = Rollout(transitions, zeros + 1, jnp.asarray(final))
    found = tiny.jit(partial(lambda_targets, parts(algorithm), lambda_=lambda_))(jnp.asarray(q)[..., None], rollout)
    for b in range(columns):
        expected = slow_lambda_targets(
            q, obs[:, b], q[successor[:, b]].max(1), reward[:, b], discount[:, b], last[:, b], gamma, lambda_
        )
        np.testing.assert_allclose(found[:, b], expected, rtol=1e-5, atol=1e-5)

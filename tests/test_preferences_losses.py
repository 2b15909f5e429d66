"""Losses on demonstrations and pairs against slow loops in float64, with their gradients, limits and closed forms."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.preferences import losses

B, T = 5, 6
LENGTHS = [3, 6, 1, 0, 4]  # one row is masked altogether
MASK = (np.arange(T)[:, None] < np.array(LENGTHS)[None]).astype(np.float32)
BETA = 0.7
PAIR = tuple(np.random.default_rng(1).normal(-3, 2, (4, B)))


def sigma(x):
    return 1 / (1 + math.exp(-x))


def slow_pair_loss(kind, chosen, rejected, ref_chosen, ref_rejected, beta=BETA, smoothing=0.0):
    """One pair at a time."""
    result = []
    for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
        h = math.log(math.exp(c) / math.exp(rc)) - math.log(math.exp(r) / math.exp(rr))
        one = {
            "sigmoid": lambda h: -math.log(sigma(beta * h)),
            "ipo": lambda h: (h - 1 / (2 * beta)) ** 2,
            "hinge": lambda h: max(0.0, 1 - beta * h),
        }[kind]
        result.append((1 - smoothing) * one(h) + smoothing * one(-h))
    return np.array(result)


def pair_loss(kind, **settings):
    """The loss as a function of the four log-probabilities of a pair."""
    return lambda *pair: losses.PAIR_LOSSES[kind].function(losses.log_ratio_margin(*pair), beta=BETA, **settings)


def slow_gradient(function, arguments, which):
    """Central differences of a sum, in float64."""
    step, gradient = 1e-6, np.zeros_like(arguments[which], dtype=np.float64)
    for i in np.ndindex(gradient.shape):
        values = []
        for sign in (1, -1):
            moved = [np.array(x, np.float64) for x in arguments]
            moved[which][i] += sign * step
            values.append(float(np.sum(function(*moved))))
        gradient[i] = (values[0] - values[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", losses.PAIR_LOSSES)
def test_losses_on_pairs_and_their_gradients(kind, smoothing):
    fast = pair_loss(kind, label_smoothing=smoothing)
    slow = partial(slow_pair_loss, kind, smoothing=smoothing)
    pair = [jnp.asarray(x, jnp.float32) for x in PAIR]
    np.testing.assert_allclose(fast(*pair), slow(*PAIR), rtol=1e-5)
    gradients = jax.grad(lambda *pair: fast(*pair).sum(), argnums=(0, 1, 2, 3))(*pair)
    assert any(abs(g).max() > 0.1 for g in gradients)
    for which, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, slow_gradient(slow, PAIR, which), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", losses.PAIR_LOSSES)
def test_losses_keep_float64(kind):
    with jax.enable_x64(True):
        pair = [jnp.asarray(x) for x in PAIR]
        loss = pair_loss(kind)(*pair)
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, slow_pair_loss(kind, *PAIR), rtol=1e-12)


@pytest.mark.parametrize(("margin", "centring"), [(0.0, 0.0), (0.4, 0.0), (np.arange(B) / 3, 0.05)])
def test_bradley_terry_and_its_gradient(margin, centring):
    chosen, rejected = PAIR[:2]

    def slow(chosen, rejected):
        margins = np.broadcast_to(margin, (B,))
        return np.array(
            [
                -math.log(sigma(c - r - m)) + centring * (c + r) ** 2
                for c, r, m in zip(chosen, rejected, margins, strict=True)
            ]
        )

    def fast(chosen, rejected):
        shift = jnp.asarray(margin, jnp.float32)
        return losses.bradley_terry(chosen, rejected, margin=shift, centring=centring)

    scores = jnp.asarray(chosen, jnp.float32), jnp.asarray(rejected, jnp.float32)
    np.testing.assert_allclose(fast(*scores), slow(chosen, rejected), rtol=1e-5)
    gradients = jax.grad(lambda *x: fast(*x).sum(), argnums=(0, 1))(*scores)
    for which, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, slow_gradient(slow, (chosen, rejected), which), rtol=1e-4, atol=1e-5)


def test_bradley_terry_by_hand():
    """Equal scores are a coin toss; a difference of log 3 is a probability of 3/4, unless a margin eats it up."""
    equal = losses.bradley_terry(jnp.ones(1), jnp.ones(1))
    better = losses.bradley_terry(jnp.full(1, math.log(3)), jnp.zeros(1))
    eaten = losses.bradley_terry(jnp.full(1, math.log(3)), jnp.zeros(1), margin=math.log(3))
    np.testing.assert_allclose([equal[0], better[0], eaten[0]], [math.log(2), math.log(4 / 3), math.log(2)], rtol=1e-6)
    assert losses.bradley_terry(jnp.ones(1), -jnp.ones(1), centring=5.0) == losses.bradley_terry(
        jnp.ones(1), -jnp.ones(1)
    )


def test_scores_far_apart_stay_finite():
    far = losses.bradley_terry(jnp.array([-1e4, 1e4]), jnp.array([1e4, -1e4]))
    np.testing.assert_allclose(far, [2e4, 0.0])


@pytest.mark.parametrize("per_token", [False, True])
def test_log_probabilities_of_completions_read_no_padding(per_token):
    log_prob = np.random.default_rng(0).normal(-2, 1, (T, B))
    poisoned = jnp.asarray(np.where(MASK > 0, log_prob, np.nan), jnp.float32)
    expected = []
    for b, length in enumerate(LENGTHS):
        total = sum(log_prob[t, b] for t in range(length))
        expected.append(total / length if per_token and length else total)

    def summed(log_prob):
        return losses.sequence_log_prob(log_prob, jnp.asarray(MASK), per_token=per_token)

    np.testing.assert_allclose(summed(poisoned), expected, rtol=1e-5)
    weights = jnp.arange(1.0, B + 1)
    gradient = jax.grad(lambda x: (weights * summed(x)).sum())(poisoned)
    per = np.maximum(LENGTHS, 1) if per_token else 1
    np.testing.assert_allclose(gradient, MASK * np.arange(1, B + 1) / per, rtol=1e-6)


def test_a_small_beta_is_a_linear_loss():
    """beta -> 0: the loss is log 2, its slope in h is -beta/2 for every pair, however far apart."""
    h = losses.log_ratio_margin(*(jnp.asarray(x, jnp.float32) for x in PAIR))
    beta = 1e-4
    loss = losses.sigmoid(h, beta=beta)
    np.testing.assert_allclose(loss, math.log(2), atol=2e-3)
    slope = jax.grad(lambda h: losses.sigmoid(h, beta=beta).sum())(h)
    np.testing.assert_allclose(slope / beta, -0.5, atol=1e-3)


@pytest.mark.parametrize("kind", losses.PAIR_LOSSES)
def test_labels_that_are_a_coin_toss_prefer_nothing(kind):
    """label_smoothing 1/2: exchanging chosen and rejected changes nothing, and h = 0 is a minimum."""
    loss = pair_loss(kind, label_smoothing=0.5)
    c, r, rc, rr = (jnp.asarray(x, jnp.float32) for x in PAIR)
    np.testing.assert_allclose(loss(c, r, rc, rr), loss(r, c, rr, rc), rtol=1e-5)
    start = jnp.zeros(1)
    slope = jax.grad(lambda h: loss(h, start, start, start).sum())(start)
    np.testing.assert_allclose(slope, 0.0, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_dpo_has_its_minimum_where_the_labels_are_as_noisy(smoothing):
    """σ(βh) = 1 - smoothing; without smoothing h runs away."""
    if smoothing == 0:
        slope = jax.grad(lambda h: losses.sigmoid(h, beta=BETA))(10.0)
        assert slope < 0
        return
    best = math.log((1 - smoothing) / smoothing) / BETA
    slope = jax.grad(lambda h: losses.sigmoid(h, beta=BETA, label_smoothing=smoothing))(best)
    np.testing.assert_allclose(slope, 0.0, atol=1e-6)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.0), (0.5, 0.2)])
def test_ipo_has_its_minimum_at_a_finite_distance(beta, smoothing):
    best = (1 - 2 * smoothing) / (2 * beta)
    loss = partial(losses.ipo, beta=beta, label_smoothing=smoothing)
    slope = jax.grad(loss)
    np.testing.assert_allclose(slope(best), 0.0, atol=1e-5)
    assert slope(best - 0.1) < 0 < slope(best + 0.1)


def test_the_hinge_lets_go_at_one_over_beta():
    loss = partial(losses.hinge, beta=BETA)
    slope = jax.grad(loss)
    assert slope(1 / BETA - 0.01) == -BETA
    assert slope(1 / BETA + 0.01) == 0


def test_the_gradient_of_dpo_has_its_closed_form():
    """-β σ(-β h) (∇ log π(y_c) - ∇ log π(y_r)), Rafailov et al. 2023, section 4, for a softmax over five answers."""
    logits = jnp.asarray(np.random.default_rng(2).normal(size=5), jnp.float32)
    reference = jax.nn.log_softmax(jnp.arange(5.0))
    chosen, rejected = jnp.array([0, 3, 2]), jnp.array([1, 0, 4])

    def loss(logits):
        log_pi = jax.nn.log_softmax(logits)
        h = losses.log_ratio_margin(log_pi[chosen], log_pi[rejected], reference[chosen], reference[rejected])
        return losses.sigmoid(h, beta=BETA).sum()

    expected, log_pi = np.zeros(5), np.asarray(jax.nn.log_softmax(logits), np.float64)
    for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True):
        h = (log_pi[c] - reference[c]) - (log_pi[r] - reference[r])
        towards = np.eye(5)[c] - np.exp(log_pi)
        away = np.eye(5)[r] - np.exp(log_pi)
        expected -= BETA * sigma(-BETA * h) * (towards - away)
    np.testing.assert_allclose(jax.grad(loss)(logits), expected, rtol=1e-4, atol=1e-6)


def test_at_the_reference_every_pair_is_undecided():
    c, r = (jnp.asarray(x, jnp.float32) for x in PAIR[:2])
    h = losses.log_ratio_margin(c, r, c, r)
    np.testing.assert_array_equal(h, 0.0)
    np.testing.assert_allclose(losses.sigmoid(h, beta=BETA), math.log(2), rtol=1e-6)


def test_preferred_counts_ties_half():
    got = losses.preferred(jnp.array([1.0, 0.0, 2.0]), jnp.array([0.0, 1.0, 2.0]))
    np.testing.assert_array_equal(got, [1.0, 0.0, 0.5])

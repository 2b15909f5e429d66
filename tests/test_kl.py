"""KL estimators by hand, and what each placement does to a policy, by enumerating every action."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxpg.errors import UserError
from jaxpg.objectives import kl as kl_estimators

COEFFICIENT = 0.3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def logits(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=6))


OLD, NEW, REF = range(3)


def kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return (jnp.exp(log_p) * (log_p - log_q)).sum()


def gradient_of_kl(seed: int) -> NDArray:
    """∇KL(π ‖ ref), exactly."""
    ref = jax.nn.log_softmax(logits(REF))
    return np.asarray(jax.grad(lambda x: kl(jax.nn.log_softmax(x), ref))(logits(seed)))


def gradient_of_reverse_kl(seed: int) -> NDArray:
    """∇KL(ref ‖ π), exactly."""
    ref = jax.nn.log_softmax(logits(REF))
    return np.asarray(jax.grad(lambda x: kl(ref, jax.nn.log_softmax(x)))(logits(seed)))


def expected_gradient(loss: Callable[[jax.Array], jax.Array], seed: int, behaviour: int) -> NDArray:
    """The mean gradient of a loss per action, over all actions by their probability under the policy that acts."""
    weight = jax.nn.softmax(logits(behaviour))
    return np.asarray(jax.grad(lambda x: (weight * loss(jax.nn.log_softmax(x))).sum())(logits(seed)))


# --- the estimators


def test_estimators_by_hand() -> None:
    log_prob, ref_log_prob = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.4]))
    log2 = np.log(2)
    np.testing.assert_allclose(kl_estimators.k1(log_prob, ref_log_prob), [log2, -log2], rtol=1e-12)
    np.testing.assert_allclose(kl_estimators.k2(log_prob, ref_log_prob), [log2**2 / 2] * 2, rtol=1e-12)
    np.testing.assert_allclose(kl_estimators.k3(log_prob, ref_log_prob), [log2 - 0.5, 1 - log2], rtol=1e-12)


def test_k1_and_k3_are_unbiased_and_k2_and_k3_not_negative() -> None:
    log_prob, ref = jax.nn.log_softmax(logits(NEW)), jax.nn.log_softmax(logits(REF))
    mean = {k: (jnp.exp(log_prob) * k(log_prob, ref)).sum() for k in (kl_estimators.k1, kl_estimators.k3)}
    for estimate in mean.values():
        np.testing.assert_allclose(estimate, kl(log_prob, ref), rtol=1e-12)
    assert (kl_estimators.k1(log_prob, ref) < 0).any()
    assert (kl_estimators.k2(log_prob, ref) > 0).all()
    assert (kl_estimators.k3(log_prob, ref) > 0).all()


def test_k3_of_a_token_that_the_policy_gave_up_is_finite() -> None:
    """It may be far off after an off-policy update; an infinite loss would end the run."""
    value, gradient = jax.value_and_grad(kl_estimators.k3)(jnp.float32(-120.0), jnp.float32(-1.0))
    assert 1e18 < value < 1e20
    assert jnp.isfinite(gradient)


@pytest.mark.parametrize("log_prob", [-30.0, -45.5, -120.0, -1e6])
def test_k3_never_leads_away_from_the_reference(log_prob: float) -> None:
    """Its descent makes a token likelier that the reference likes, and leaves it where float32 ends."""
    gradient = jax.grad(kl_estimators.k3)(jnp.float32(log_prob), jnp.float32(-1.0))
    assert gradient < 0 if log_prob > -45 else gradient == 0


def test_k3_keeps_its_digits_near_the_reference() -> None:
    log_prob, gap = jnp.float32(-1.0), jnp.float32(2.0**-12)
    np.testing.assert_allclose(kl_estimators.k3(log_prob, log_prob + gap), float(gap) ** 2 / 2, rtol=1e-3)


# --- the placements


@pytest.mark.parametrize("behaviour", [NEW, OLD])
def test_loss_ratio_k3_descends_the_kl_whoever_acted(behaviour: int) -> None:
    in_loss = kl_estimators.reference_kl("loss_ratio_k3", COEFFICIENT).in_loss
    old, ref = jax.nn.log_softmax(logits(behaviour)), jax.nn.log_softmax(logits(REF))
    got = expected_gradient(lambda log_prob: in_loss(log_prob, old, ref), NEW, behaviour)
    np.testing.assert_allclose(got, COEFFICIENT * gradient_of_kl(NEW), atol=1e-12)


@pytest.mark.parametrize(("placement", "exact"), [("loss_k2", gradient_of_kl), ("loss_k3", gradient_of_reverse_kl)])
def test_what_k2_and_k3_in_the_loss_descend(placement: str, exact: Callable[[int], NDArray]) -> None:
    in_loss = kl_estimators.reference_kl(placement, COEFFICIENT).in_loss
    ref = jax.nn.log_softmax(logits(REF))
    got = expected_gradient(lambda log_prob: in_loss(log_prob, log_prob, ref), NEW, NEW)
    np.testing.assert_allclose(got, COEFFICIENT * exact(NEW), atol=1e-12)
    assert np.abs(gradient_of_kl(NEW) - gradient_of_reverse_kl(NEW)).max() > 0.05  # the two can be told apart


def test_k1_in_the_reward_descends_the_kl() -> None:
    in_reward = kl_estimators.reference_kl("reward_k1", COEFFICIENT).in_reward
    ref = jax.nn.log_softmax(logits(REF))

    def score_function(log_prob: jax.Array) -> jax.Array:
        return -log_prob * in_reward(log_prob, ref)  # of the gradient only what the score carries: the reward has none

    got = expected_gradient(score_function, NEW, NEW)
    np.testing.assert_allclose(got, COEFFICIENT * gradient_of_kl(NEW), atol=1e-12)


def test_k1_in_the_loss_penalises_nothing_and_is_refused() -> None:
    ref = jax.nn.log_softmax(logits(REF))
    got = expected_gradient(lambda log_prob: kl_estimators.k1(log_prob, ref), NEW, NEW)
    np.testing.assert_allclose(got, 0, atol=1e-12)
    with pytest.raises(UserError, match="expectation is zero"):
        kl_estimators.reference_kl("loss_k1", COEFFICIENT)


@pytest.mark.parametrize("placement", ["loss_k2", "loss_k3", "loss_ratio_k3"])
def test_in_the_loss_only_the_policy_is_trained(placement: str) -> None:
    in_loss = kl_estimators.reference_kl(placement, COEFFICIENT).in_loss
    assert kl_estimators.reference_kl(placement, COEFFICIENT).in_reward is None
    args = tuple(jax.nn.log_softmax(logits(seed)) for seed in (NEW, OLD, REF))
    by_log_prob, by_old, by_ref = jax.grad(lambda *x: in_loss(*x).sum(), argnums=(0, 1, 2))(*args)
    assert (by_log_prob != 0).any()
    assert (by_old == 0).all()
    assert (by_ref == 0).all()


def test_an_unknown_placement_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'k3'.*loss_k2, loss_k3, loss_ratio_k3, reward_k1"):
        kl_estimators.reference_kl("k3", COEFFICIENT)


@pytest.mark.parametrize("placement", ["reward_k1", "loss_k2", "loss_k3", "loss_ratio_k3"])
def test_equal_settings_give_equal_records(placement: str) -> None:
    def parts(coefficient: float) -> list[tuple]:
        return [f and (f.func, f.keywords) for f in kl_estimators.reference_kl(placement, coefficient)]

    assert parts(0.1) == parts(0.1)
    assert parts(0.1) != parts(0.2)


def test_the_coefficient_may_be_mapped_over() -> None:
    args = tuple(jax.nn.log_softmax(logits(seed)) for seed in (NEW, OLD, REF))
    mapped = jax.jit(jax.vmap(lambda c: kl_estimators.reference_kl("loss_k3", c).in_loss(*args)))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(mapped[1], 2 * mapped[0], rtol=1e-12)

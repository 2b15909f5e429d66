"""Losses by hand, the gradients they leave, and the limits in which one becomes another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.objectives import surrogates

POLICY_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "score_function": surrogates.score_function,
    "importance_ratio": surrogates.importance_ratio,
    "clipped_ratio": surrogates.clipped_ratio,
    "clipped_weight": partial(surrogates.clipped_weight, clip_low=0.1, clip_high=0.3),
    "clipped_ratio_asymmetric": partial(surrogates.clipped_ratio, clip_low=0.1, clip_high=0.3),
    "clipped_ratio_dual": partial(surrogates.clipped_ratio, dual_clip=3.0),
}
VALUE_LOSSES: dict[str, Callable[..., jax.Array]] = {
    "squared_error": surrogates.squared_error,
    "clipped_squared_error": surrogates.clipped_squared_error,
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def random_batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log_prob, old_log_prob, advantage of `[T, B]` with ratios well beyond all clips."""
    rng = np.random.default_rng(seed)
    old_log_prob = -rng.random((50, 8))
    return old_log_prob + rng.normal(size=(50, 8)), old_log_prob, rng.normal(size=(50, 8))


def gradient(loss: Callable[..., jax.Array], x: np.ndarray, *args: np.ndarray) -> jax.Array:
    return jax.grad(lambda x: loss(x, *args).sum())(jnp.asarray(x))


# --- policy losses

RATIO = np.array([0.25, 0.95, 1.0, 1.15, 4.0])


@pytest.mark.parametrize(
    ("loss", "advantage", "expected"),
    [
        ("importance_ratio", 2.0, [-0.5, -1.9, -2, -2.3, -8]),
        ("importance_ratio", -2.0, [0.5, 1.9, 2, 2.3, 8]),
        ("clipped_ratio", 2.0, [-0.5, -1.9, -2, -2.3, -2.4]),
        ("clipped_ratio", -2.0, [1.6, 1.9, 2, 2.3, 8]),
        ("clipped_ratio_asymmetric", 2.0, [-0.5, -1.9, -2, -2.3, -2.6]),
        ("clipped_ratio_asymmetric", -2.0, [1.8, 1.9, 2, 2.3, 8]),
        ("clipped_ratio_dual", 2.0, [-0.5, -1.9, -2, -2.3, -2.4]),
        ("clipped_ratio_dual", -2.0, [1.6, 1.9, 2, 2.3, 6]),
    ],
)
def test_policy_loss_by_hand(loss: str, advantage: float, expected: list[float]) -> None:
    old_log_prob = np.full(5, -0.7)
    log_prob = old_log_prob + np.log(RATIO)
    got = jax.jit(POLICY_LOSSES[loss])(log_prob, old_log_prob, np.full(5, advantage))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_score_function_by_hand() -> None:
    got = surrogates.score_function(jnp.array([-1.0, -2.0]), jnp.array([-9.0, 9.0]), jnp.array([3.0, -4.0]))
    np.testing.assert_array_equal(got, [3.0, -8.0])


@pytest.mark.parametrize(("advantage", "trained"), [(1.5, [1, 1, 1, 1, 0]), (-1.5, [0, 1, 1, 1, 1])])
def test_the_clip_takes_the_gradient_on_one_side_only(advantage: float, trained: list[int]) -> None:
    old_log_prob, a = np.full(5, -0.7), np.full(5, advantage)
    got = gradient(surrogates.clipped_ratio, old_log_prob + np.log(RATIO), old_log_prob, a)
    np.testing.assert_allclose(got, -RATIO * a * np.array(trained), rtol=1e-12)


def test_the_dual_clip_takes_the_gradient_of_far_ratios_of_bad_actions() -> None:
    old_log_prob, a = np.full(5, -0.7), np.full(5, -1.5)
    got = gradient(POLICY_LOSSES["clipped_ratio_dual"], old_log_prob + np.log(RATIO), old_log_prob, a)
    np.testing.assert_allclose(got, -RATIO * a * np.array([0, 1, 1, 1, 0]), rtol=1e-12)


def test_the_clipped_weight_leaves_every_step_its_gradient() -> None:
    old_log_prob, a = np.full(5, -0.7), np.array([1.5, -1.5, 1.5, -1.5, 1.5])
    got = gradient(POLICY_LOSSES["clipped_weight"], old_log_prob + np.log(RATIO), old_log_prob, a)
    np.testing.assert_allclose(got, -np.clip(RATIO, 0.9, 1.3) * a, rtol=1e-12)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_on_the_policy_that_acted_every_gradient_is_the_policy_gradient(loss: str) -> None:
    _, old_log_prob, advantage = random_batch(0)
    np.testing.assert_allclose(
        gradient(POLICY_LOSSES[loss], old_log_prob, old_log_prob, advantage), -advantage, rtol=1e-12
    )


def test_without_clips_the_ratio_is_left() -> None:
    args = random_batch(1)
    infinite = partial(surrogates.clipped_ratio, clip_low=np.inf, clip_high=np.inf, dual_clip=np.inf)
    np.testing.assert_array_equal(infinite(*args), surrogates.importance_ratio(*args))
    np.testing.assert_array_equal(gradient(infinite, *args), gradient(surrogates.importance_ratio, *args))


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_advantage_is_a_constant(loss: str) -> None:
    args = random_batch(2)
    of_advantage = jax.grad(lambda a: POLICY_LOSSES[loss](*args[:2], a).sum())(jnp.asarray(args[2]))
    np.testing.assert_array_equal(of_advantage, np.zeros_like(args[2]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_ratio_beyond_all_floats_leaves_finite_gradients(dtype: type) -> None:
    log_prob, old_log_prob = jnp.zeros(2, dtype), jnp.full(2, -1e4, dtype)
    advantage = jnp.array([1.0, -1.0], dtype)
    clipped = gradient(surrogates.clipped_ratio, log_prob, old_log_prob, advantage)
    assert clipped[0] == 0
    for loss in POLICY_LOSSES.values():
        assert jnp.isfinite(loss(log_prob, old_log_prob, advantage)).all()
        assert jnp.isfinite(gradient(loss, log_prob, old_log_prob, advantage)).all()


def test_clip_settings_may_be_mapped_over() -> None:
    args, clips = random_batch(3), np.array([0.05, 0.2, 1.0])
    mapped = jax.vmap(lambda c: surrogates.clipped_ratio(*args, clip_low=c, clip_high=2 * c, dual_clip=1 + c))(clips)
    for clip, got in zip(clips, mapped, strict=True):
        expected = surrogates.clipped_ratio(*args, clip_low=clip, clip_high=2 * clip, dual_clip=1 + clip)
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_ratio_at_its_limit_is_not_held() -> None:
    log_prob, advantage = np.zeros(2), np.array([2.0, -2.0])
    for settings in ({"clip_low": 0.0, "clip_high": 0.0}, {"dual_clip": 1.0}):
        got = gradient(partial(surrogates.clipped_ratio, **settings), log_prob, log_prob, advantage)
        np.testing.assert_array_equal(got, -advantage)


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        ("importance_ratio", [], []),
        ("clipped_ratio", [5], [4]),
        ("clipped_ratio_asymmetric", [5], [4]),
        ("clipped_ratio_dual", [5], [4, 9]),
        ("clipped_weight", [], []),
    ],
)
def test_a_step_is_clipped_where_its_loss_has_no_slope(loss: str, low: list[int], high: list[int]) -> None:
    """The ratios above with a positive advantage, a negative one (from 5 on) and one of zero (from 10 on)."""
    old_log_prob, advantage = np.full(15, -0.7), np.repeat([1.5, -1.5, 0.0], 5)
    log_prob = jnp.asarray(old_log_prob + np.tile(np.log(RATIO), 3))
    args = (log_prob, jnp.asarray(old_log_prob), jnp.asarray(advantage))
    got = surrogates.loss_and_clipped(POLICY_LOSSES[loss], *args)
    np.testing.assert_array_equal(got.loss, POLICY_LOSSES[loss](*args))
    np.testing.assert_array_equal(np.flatnonzero(got.clipped_low), low)
    np.testing.assert_array_equal(np.flatnonzero(got.clipped_high), high)


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(0.7, -1.0, 0.8), (0.85, -1.0, 0.85), (1.3, 1.0, -1.3)])
def test_a_ratio_between_the_two_clips_is_judged_by_its_own(ratio: float, advantage: float, loss: float) -> None:
    """With a clip of 0.2 downwards and of 0.5 upwards: 0.7 is clipped to 0.8, and 1.3 is not clipped."""
    log_prob, zero = jnp.log(jnp.array([ratio])), jnp.zeros(1)
    got = surrogates.clipped_ratio(log_prob, zero, jnp.array([advantage]), clip_low=0.2, clip_high=0.5)
    np.testing.assert_allclose(got, [loss], rtol=1e-6)


def test_the_ratio_of_an_episode_is_the_geometric_mean_of_its_real_steps() -> None:
    ratio = np.array([[2.0, 4.0, 9.0], [8.0, 1e30, 9.0], [1e30, np.nan, 9.0]])
    mask = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = np.exp(surrogates.episode_log_ratio(jnp.log(ratio) - 5.0, jnp.full((3, 3), -5.0), mask))
    np.testing.assert_allclose(found, np.broadcast_to([4.0, 4.0, 1.0], (3, 3)))  # of no step it is 1
    slope = jax.grad(lambda x: surrogates.episode_log_ratio(x, jnp.zeros((3, 3)), mask)[0].sum())(jnp.log(ratio))
    np.testing.assert_allclose(slope, [[0.5, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_an_untied_minimum_is_a_minimum_with_the_whole_slope_at_a_tie() -> None:
    x = jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(surrogates.untied_minimum(x, 2.0), jnp.minimum(x, 2.0))
    assert jax.grad(surrogates.untied_minimum)(2.0, 2.0) == 1.0
    assert jax.grad(jnp.minimum)(2.0, 2.0) == 0.5


def test_an_untied_maximum_is_a_maximum_where_it_is_wanted() -> None:
    x, where = jnp.array([1.0, 2.0, 3.0] * 2), jnp.arange(6) < 3
    got = surrogates.untied_maximum(x, jnp.asarray(2.0), where)
    np.testing.assert_array_equal(got, jnp.where(where, jnp.maximum(x, 2.0), x))
    assert jax.grad(surrogates.untied_maximum)(2.0, jnp.asarray(2.0), jnp.asarray(True)) == 1.0


# --- value losses

VALUE = np.array([1.0, 1.1, 1.5, 0.0, 0.0])
OLD_VALUE = np.array([1.0, 1.0, 1.0, 1.0, 1.0])
TARGET = np.array([3.0, 3.0, 3.0, 3.0, 0.5])


def test_value_losses_by_hand() -> None:
    plain = surrogates.squared_error(VALUE, OLD_VALUE, TARGET)
    np.testing.assert_allclose(plain, np.array([4, 3.61, 2.25, 9, 0.25]) / 2, rtol=1e-12)
    # columns: unmoved; within the clip; moved past it towards the target; moved past it away; past the target
    clipped = surrogates.clipped_squared_error(VALUE, OLD_VALUE, TARGET)
    np.testing.assert_allclose(clipped, np.array([4, 3.61, 1.8**2, 9, 0.25]) / 2, rtol=1e-12)


def test_the_value_clip_takes_the_gradient_of_moves_that_went_far_enough() -> None:
    got = gradient(surrogates.clipped_squared_error, VALUE, OLD_VALUE, TARGET)
    np.testing.assert_allclose(got, (VALUE - TARGET) * np.array([1, 1, 0, 1, 1]), rtol=1e-12)


def test_a_value_that_hardly_moved_has_the_whole_slope_however_it_is_rounded() -> None:
    rng = np.random.default_rng(4)
    old_value, target = rng.normal(size=(2, 1000)).astype(np.float32)
    value = old_value + np.float32(1e-4) * rng.normal(size=1000).astype(np.float32)
    got = gradient(surrogates.clipped_squared_error, value, old_value, target)
    np.testing.assert_array_equal(got, value - target)


def test_without_a_clip_the_squared_error_is_left() -> None:
    args = random_batch(5)
    unclipped = partial(surrogates.clipped_squared_error, clip=np.inf)
    np.testing.assert_allclose(unclipped(*args), surrogates.squared_error(*args), rtol=1e-12)


@pytest.mark.parametrize("loss", VALUE_LOSSES)
def test_only_the_value_is_trained(loss: str) -> None:
    args = tuple(map(jnp.asarray, random_batch(6)))
    by_value, by_old_value, by_target = jax.grad(lambda *x: VALUE_LOSSES[loss](*x).sum(), argnums=(0, 1, 2))(*args)
    assert (by_value != 0).any()
    assert (by_old_value == 0).all()
    assert (by_target == 0).all()


@pytest.mark.parametrize("loss", POLICY_LOSSES | VALUE_LOSSES)
def test_float32_stays(loss: str) -> None:
    x = jnp.ones((2, 3), jnp.float32)
    assert (POLICY_LOSSES | VALUE_LOSSES)[loss](x, x, x).dtype == jnp.float32

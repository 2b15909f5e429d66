"""Running moments and reward scales against numpy and slow loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh, PartitionSpec

from jaxpg import ladder, parallel, update
from jaxpg.parallel import collectives
from jaxpg.policy_gradient import policy_gradient
from jaxpg.update import normalization


def batches(shape=(3,), seed=0):
    """Batches of changing scale, with a mask; what it hides is poison."""
    rng = np.random.default_rng(seed)
    for i in range(6):
        x = rng.normal(loc=5.0 * i, scale=1.0 + i, size=(7, 8, *shape)).astype(np.float32)
        mask = (rng.random((7, 8)) < 0.7).astype(np.float32) if i != 3 else np.zeros((7, 8), np.float32)
        x[mask == 0] = 1000.0
        yield x, mask


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_moments_are_those_of_all_that_was_seen(shape):
    moments, seen = update.initial_moments(jnp.zeros(shape)), []
    for x, mask in batches(shape):
        moments = update.update_moments(moments, jnp.asarray(x), jnp.asarray(mask))
        seen.append(x[mask > 0])
        everything = np.concatenate(seen).astype(np.float64)
        assert moments.samples == len(everything)
        np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
        np.testing.assert_allclose(moments.variance, everything.var(0), rtol=1e-5)


def test_moments_stay_exact_far_from_zero():
    """Where a sum of squares less the squared mean would lose every digit in float32."""
    x = np.random.default_rng(0).normal(3000.0, 0.1, (50, 20)).astype(np.float32)
    moments = update.initial_moments()
    for part in np.split(x, 5):
        moments = update.update_moments(moments, jnp.asarray(part), jnp.ones(part.shape))
    np.testing.assert_allclose(moments.variance, x.astype(np.float64).var(), rtol=1e-2)


def test_roundings_do_not_add_up_over_a_long_run():
    """The same five samples after 10^7 samples of their mean and variance, 10^5 times."""
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, (1, 5, 64)), jnp.float32)
    begin = update.update_moments(update.initial_moments(jnp.zeros(64)), x, jnp.ones((1, 5)))

    @jax.jit
    def often(moments):
        return jax.lax.fori_loop(0, 100_000, lambda _, m: update.update_moments(m, x, jnp.ones((1, 5))), moments)

    end = often(begin._replace(samples=jnp.float32(1e7)))
    np.testing.assert_allclose(end.mean, begin.mean, rtol=1e-5)
    np.testing.assert_allclose(end.variance, begin.variance, rtol=1e-5)


def test_the_variance_before_any_sample_leaves_no_rounding():
    """It is 1, beside which that of small numbers is nothing."""
    x = np.random.default_rng(0).normal(0.0, 1e-6, (7, 8)).astype(np.float32)
    moments = update.update_moments(update.initial_moments(), jnp.asarray(x), jnp.ones((7, 8)))
    np.testing.assert_allclose(moments.variance, x.astype(np.float64).var(), rtol=1e-5)


def test_nothing_seen_changes_nothing():
    empty = update.update_moments(update.initial_moments(), jnp.full((2, 2), 9.0), jnp.zeros((2, 2)))
    assert (empty.samples, empty.mean, empty.variance) == (0, 0, 1)


def test_devices_share_moments():
    mesh = Mesh(np.array(jax.devices()[:4]), (collectives.DATA,))
    columns, everywhere = PartitionSpec(None, collectives.DATA), PartitionSpec()
    over_devices = parallel.spread(
        update.update_moments, mesh, in_specs=(everywhere, columns, columns), out_specs=everywhere
    )
    one = four = update.initial_moments(jnp.zeros(3))
    for x, mask in batches():
        one = update.update_moments(one, jnp.asarray(x), jnp.asarray(mask))
        four = jax.jit(over_devices)(four, jnp.asarray(x), jnp.asarray(mask))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), four, one)


def test_standardised_is_centred_scaled_and_clipped():
    moments = update.Moments(jnp.float32(9), jnp.array([1.0, -2.0]), jnp.array([4.0, 0.25]))
    x = jnp.array([[[1.0, -2.0], [3.0, -1.0]], [[100.0, -100.0], [-5.0, -2.5]]])
    expected = [[[0.0, 0.0], [1.0, 2.0]], [[10.0, -10.0], [-3.0, -1.0]]]
    np.testing.assert_allclose(update.normalize_obs(moments, x), expected, rtol=1e-6)
    np.testing.assert_allclose(update.normalize_obs(moments, x[0, 1]), expected[0][1], rtol=1e-6)
    np.testing.assert_allclose(update.normalize_obs(moments, x, limit=1.5)[1, 0], [1.5, -1.5])


def test_scaled_is_not_centred():
    moments = update.Moments(jnp.float32(9), jnp.float32(7.0), jnp.float32(4.0))
    np.testing.assert_allclose(update.scale_rewards(moments, jnp.array([[4.0, 0.0, -90.0]])), [[2.0, 0.0, -10.0]])


def test_forward_returns_are_a_slow_loop():
    rng = np.random.default_rng(1)
    reward, last = rng.normal(size=(9, 5)).astype(np.float32), rng.random((9, 5)) < 0.3
    start = rng.normal(size=5).astype(np.float32)
    trace, expected = start.copy(), np.zeros_like(reward)
    for t in range(9):
        for b in range(5):
            expected[t, b] = 0.9 * trace[b] + reward[t, b]
            trace[b] = 0.0 if last[t, b] else expected[t, b]
    after, sums = update.discounted_reward_sums(jnp.asarray(start), jnp.asarray(reward), jnp.asarray(last), 0.9)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    np.testing.assert_allclose(after, trace, rtol=1e-5)


def test_a_learner_scales_rewards_by_the_spread_of_discounted_sums_across_rollouts():
    """Three rollouts of a learner against a loop: the sums go on from one to the next, and end with the episode."""
    env, gamma, seen = tiny.counter(longest=9, time_limit=6), 0.9, []
    algorithm = ladder.a2c(num_envs=4, num_steps=5, gamma=gamma, learning_rate=0.0)

    def spy_update(objective, optimizer, learning_rate, params, opt_state, batch, key):
        seen.append(batch.rollout.steps)
        return params, opt_state, {}

    policy, critic = tiny.softmax_policy(jnp.zeros((2, 3))), tiny.value_table(jnp.zeros(2))
    plain, scaled = (
        policy_gradient(env, policy, critic, algorithm._replace(update=spy_update), scale_rewards=scale)
        for scale in (False, True)
    )
    for learner in (plain, scaled):
        state = learner.init(jax.random.key(0))
        for i in range(3):
            state, _ = learner.step(state, jax.random.key(i))
    raw, got = seen[:3], seen[3:]
    sums, trace = [], np.zeros(4)
    for before, after in zip(raw, got, strict=True):
        for reward, last in zip(np.asarray(before.reward), np.asarray(before.last), strict=True):
            trace = gamma * trace + reward
            sums.append(trace)
            trace = np.where(last, 0.0, trace)
        np.testing.assert_allclose(after.reward, before.reward / np.std(sums), rtol=1e-4)


def test_a_learner_acts_and_learns_on_the_same_scale_of_observations():
    """The moments are those of the rollouts before, so the first ratio of an update is one, to rounding."""
    env = tiny.counter()
    algorithm = ladder.ppo(num_envs=4, num_steps=6, epochs=1, num_minibatches=1, learning_rate=0.0)
    policy = tiny.softmax_policy(jnp.ones((2, 3)) * jnp.array([0.0, 0.2, -0.3])[None])
    learner = policy_gradient(env, policy, tiny.value_table(jnp.zeros(2)), algorithm, normalize_observations=True)
    state, step = learner.init(jax.random.key(0)), tiny.jit(learner.step)
    for i in range(3):
        before = state.normalization.obs
        state, metrics = step(state, jax.random.key(i))
        assert metrics["approx_kl"] < 1e-12
        assert state.normalization.obs.samples == before.samples + 24
        assert (state.normalization.obs.mean != before.mean).all()


def test_successors_are_on_the_same_scale_as_observations():
    env, seen = tiny.counter(longest=9, time_limit=3), []
    algorithm = ladder.a2c(num_envs=4, num_steps=5, learning_rate=0.0)

    def spy_update(objective, optimizer, learning_rate, params, opt_state, batch, key):
        seen.append(batch.rollout)
        return params, opt_state, {}

    policy, critic = tiny.softmax_policy(jnp.zeros((2, 3))), tiny.value_table(jnp.zeros(2))
    for normalize in (False, True):
        learner = policy_gradient(
            env, policy, critic, algorithm._replace(update=spy_update), normalize_observations=normalize
        )
        state = learner.init(jax.random.key(0))
        for i in range(2):
            before, (state, _) = state.normalization.obs, learner.step(state, jax.random.key(i))
    raw, got = seen[1], seen[3]
    assert np.asarray(raw.final_obs).any((0, 2)).all()
    for name, x, y in (("obs", raw.steps.obs, got.steps.obs), ("final_obs", raw.final_obs, got.final_obs)):
        np.testing.assert_allclose(y, update.normalize_obs(before, x), rtol=1e-5, err_msg=name)


def test_a_context_stays_as_it_is():
    """It is no observation, and may have another structure."""
    counter = tiny.counter()
    env = counter._replace(context=lambda state: {"goal": jnp.full(3, 7.0)})
    policy = tiny.softmax_policy(jnp.zeros((2, 3)))
    policy = policy._replace(start=lambda params, first: first["goal"])
    algorithm = ladder.actor_critic_mc(num_envs=4)
    learner = policy_gradient(env, policy, tiny.value_table(jnp.zeros(2)), algorithm, normalize_observations=True)
    state = learner.init(jax.random.key(0))
    state, _ = tiny.jit(learner.step)(state, jax.random.key(1))
    assert state.normalization.obs.samples > 0
    np.testing.assert_array_equal(learner.actor(state).start({"goal": jnp.full(3, 7.0)}), np.full(3, 7.0))


@pytest.mark.parametrize("number", [33.3, 1000.1, 123456.7])
def test_a_constant_observation_becomes_0(number):
    """Its mean is that number, not one that rounding has moved, and so is 0 over any spread."""
    rollout = tiny.resting(jnp.full((2_048, 1), number))
    state = normalization.NormalizationState(normalization.initial_moments(jnp.zeros(1)), (), {})
    for _ in range(2):
        _, _, state = normalization.normalize_rollout(rollout, (), state, 0.99)
    np.testing.assert_array_equal(normalization.normalize_obs(state.obs, rollout.steps.obs), 0)

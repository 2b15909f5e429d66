"""Switch the new thing off, get the parent."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny

from jaxpg import envs, ladder, networks, rollout, update
from jaxpg.algorithm import needs_trajectories
from jaxpg.errors import UserError
from jaxpg.objectives import advantages, loss_weights, surrogates
from jaxpg.policy_gradient import policy_gradient

ENV = tiny.counter()
BANDIT = envs.as_env(
    envs.MDP(P=jnp.ones((1, 2, 1)), R=jnp.array([[[1.0], [3.0]]]), start=jnp.ones(1), terminal=jnp.zeros(1, bool)),
    time_limit=1,
    name="bandit",
)
WHOLE = {"num_envs": 8, "learning_rate": 1.0}
SEGMENT = WHOLE | {"num_steps": 6}
ONE_STEP = {"epochs": 1, "num_minibatches": 1}
PLAIN = {"max_grad_norm": None, "normalize_advantages": False}
ALONE = WHOLE | ONE_STEP | PLAIN | {"kl": None}


def one_update(algorithm, env=ENV, iterations=1):
    """How iterations of plain gradient descent move the parameters of a linear policy and a linear critic."""
    algorithm = algorithm._replace(optimizer=update.sgd)
    features, actions = env.observation_space.shape[0], env.action_space.n
    policy = tiny.softmax_policy(0.1 * jnp.arange(float(features * actions)).reshape(features, actions))
    learner = policy_gradient(env, policy, tiny.value_table(jnp.ones(features)), algorithm)

    def run(key):
        before = learner.init(key)
        after, _ = jax.lax.scan(learner.step, before, jax.random.split(key, iterations))
        return jax.flatten_util.ravel_pytree(jax.tree.map(jnp.subtract, after.params, before.params))[0]

    return np.asarray(tiny.jit(run)(jax.random.key(0)))


def same(one, other):
    scale = np.abs(other).max()
    assert np.isfinite(one).all()  # else they differ, whatever was changed
    assert scale > 1e-6  # nothing is proved by two steps of no length
    return np.abs(one - other).max() < 2e-5 * scale


def test_an_infinite_clip_is_the_importance_ratio():
    # The critic, which no clip concerns, stands still: at this step size it would drown the policy.
    settings = SEGMENT | {"epochs": 3, "num_minibatches": 2, "learning_rate": 0.5, "value_coefficient": 0.0}
    ratio = one_update(ladder.ppo(**settings)._replace(surrogate=surrogates.importance_ratio))
    assert same(one_update(ladder.ppo(clip=np.inf, **settings)), ratio)
    assert not same(one_update(ladder.ppo(clip=0.01, **settings)), ratio)


@pytest.mark.parametrize("normalize_advantages", [False, True])
def test_ppo_of_one_epoch_and_one_minibatch_is_a2c(normalize_advantages):
    shared = SEGMENT | {"normalize_advantages": normalize_advantages, "gae_lambda": 0.9, "max_grad_norm": None}
    a2c = one_update(ladder.a2c(**shared))
    assert same(one_update(ladder.ppo(**shared, **ONE_STEP)), a2c)
    assert not same(one_update(ladder.ppo(**shared, epochs=2, num_minibatches=1)), a2c)


def test_one_minibatch_steps_where_the_gradient_of_the_importance_ratio_points():
    shared = SEGMENT | PLAIN | {"gae_lambda": 0.9}
    ratio = ladder.a2c(**shared)._replace(surrogate=surrogates.importance_ratio)
    assert same(one_update(ratio), one_update(ladder.a2c(**shared)))


def test_lambda_one_is_the_n_step_return_of_the_segment_and_lambda_zero_one_step():
    td = ladder.actor_critic_td(**SEGMENT)
    assert same(one_update(ladder.a2c(gae_lambda=1.0, **SEGMENT)), one_update(td))
    one_step = td._replace(credit=partial(advantages.n_step, n=1))
    assert same(one_update(ladder.a2c(gae_lambda=0.0, **SEGMENT)), one_update(one_step))
    assert not same(one_update(td), one_update(one_step))


def test_lambda_one_over_whole_episodes_is_monte_carlo_minus_value():
    mc = ladder.actor_critic_mc(**WHOLE)
    assert same(one_update(mc._replace(credit=partial(advantages.generalized_advantage, lambda_=1.0))), one_update(mc))


def test_a_baseline_that_has_seen_nothing_is_none():
    settings = WHOLE | {"learning_rate": 1e-3}
    baseline, to_go = ladder.reinforce_baseline(baseline_kind="running", **settings), ladder.reinforce_to_go(**settings)
    assert same(one_update(baseline), one_update(to_go))
    assert not same(one_update(baseline, iterations=2), one_update(to_go, iterations=2))


@pytest.mark.parametrize("begun", [True, False])
def test_the_reference_is_the_policy_that_a_run_begins_with(begun):
    """So the KL of the first step is 0, whatever policy `init` had made."""
    policy, given = tiny.softmax_policy(jnp.zeros((2, 3))), 0.1 * jnp.arange(6.0).reshape(2, 3)
    learner = policy_gradient(ENV, policy, None, ladder.grpo(group_size=4, **ALONE | {"kl": "loss_k3"}))

    def first_kl(key):
        state = learner.init(key)
        moved = state._replace(params=state.params._replace(policy=given))
        return learner.step(learner.with_policy(state, given) if begun else moved, key)[1]["reference_kl"]

    kl = tiny.jit(first_kl)(jax.random.key(0))
    assert kl == 0 if begun else kl > 1e-3


def test_an_episode_of_one_step_has_one_return():
    assert same(one_update(ladder.reinforce(**WHOLE), BANDIT), one_update(ladder.reinforce_to_go(**WHOLE), BANDIT))
    assert not same(one_update(ladder.reinforce(**WHOLE)), one_update(ladder.reinforce_to_go(**WHOLE)))


def test_one_group_is_the_batch_and_its_mean_the_batch_baseline():
    """On episodes of one step, where the mean over steps is the mean over episodes."""
    batch = one_update(ladder.reinforce_baseline(**WHOLE), BANDIT)
    assert same(one_update(ladder.dr_grpo(group_size=8, max_length=1, **ALONE), BANDIT), batch)
    assert not same(one_update(ladder.dr_grpo(group_size=4, max_length=1, **ALONE), BANDIT), batch)


def test_equal_lengths_make_grpo_and_dr_grpo_weigh_alike():
    equal, unequal = jnp.ones((5, 8)), (jnp.arange(5)[:, None] <= jnp.arange(8)[None, :]).astype(jnp.float32)
    np.testing.assert_allclose(loss_weights.per_episode(equal), loss_weights.per_episode_over(equal, 5), rtol=1e-6)
    np.testing.assert_allclose(loss_weights.per_episode(equal), loss_weights.per_step(equal), rtol=1e-6)
    ratio = loss_weights.per_episode(unequal)[0] / loss_weights.per_episode_over(unequal, 5)[0]
    np.testing.assert_allclose(ratio, 5 / unequal.sum(0), rtol=1e-6)


def test_equal_lengths_make_rloo_and_dr_grpo_proportional():
    env = tiny.counter(shortest=9, longest=9, time_limit=4)
    settings = ALONE | {"group_size": 4}
    rloo, dr_grpo = one_update(ladder.rloo(**settings), env), one_update(ladder.dr_grpo(max_length=4, **settings), env)
    assert same(rloo, dr_grpo * 4 / 3)


def test_a_penalty_without_weight_or_a_reference_that_keeps_up_is_none():
    settings = ALONE | {"epochs": 2, "group_size": 4}
    none = one_update(ladder.grpo(**settings), iterations=2)
    settings |= {"kl": "loss_k3"}
    assert same(one_update(ladder.grpo(kl_coefficient=0.0, **settings), iterations=2), none)
    assert not same(one_update(ladder.grpo(kl_coefficient=1.0, **settings), iterations=2), none)
    follows = {"kl_coefficient": 1.0, "reference_rate": 1.0, **settings, "epochs": 1}
    assert same(
        one_update(ladder.grpo(**follows), iterations=2), one_update(ladder.grpo(**ALONE, group_size=4), iterations=2)
    )


def first_round(collector):
    """The collector with the key that the first round of a refilled one gets."""

    def collect(env, policy, params, runner, key):
        return collector.collect(env, policy, params, runner, jax.random.fold_in(key, 0))

    return collector._replace(collect=collect)


@pytest.mark.full
def test_one_action_per_episode_makes_gspo_and_grpo_clip_alike():
    settings = ALONE | {"group_size": 4, "epochs": 4, "num_minibatches": 2, "clip": 0.02, "clip_high": 0.03}
    grpo = one_update(ladder.grpo(**settings), BANDIT)
    assert same(one_update(ladder.gspo(**settings), BANDIT), grpo)
    assert not same(one_update(ladder.grpo(**settings | {"clip": 0.5, "clip_high": 0.5}), BANDIT), grpo)


@pytest.mark.full
def test_at_the_policy_that_acted_gspo_steps_where_grpo_does():
    """Also where lengths differ; a second epoch, whose ratios are no longer 1, tells them apart."""
    once, twice = ({**ALONE, "group_size": 4, "epochs": epochs, "clip": 0.2, "clip_high": 0.2} for epochs in (1, 2))
    assert same(one_update(ladder.gspo(**once)), one_update(ladder.grpo(**once)))
    assert not same(one_update(ladder.gspo(**twice)), one_update(ladder.grpo(**twice)))


def test_a_loss_of_whole_episodes_is_never_cut():
    """Its minibatches are columns, also of a policy without memory; segments are refused."""
    env, policy = ENV, tiny.softmax_policy(jnp.zeros((ENV.observation_space.shape[0], 3)))
    cut = [needs_trajectories(policy, ladder.ALGORITHMS[name]()) for name in ("grpo", "gspo")]
    assert cut == [False, True]
    ppo = ladder.ppo()
    whole = ppo._replace(surrogate=surrogates.PerEpisode(ppo.surrogate), value_loss=None)
    with pytest.raises(UserError, match="whole episodes"):
        policy_gradient(env, policy, None, whole)
    policy_gradient(env, policy, None, whole._replace(collector=rollout.episodic(num_envs=4)))


def test_dapo_with_signal_everywhere_is_grpo_weighing_all_steps_alike():
    settings = WHOLE | ONE_STEP | PLAIN | {"group_size": 4, "clip_high": 0.28}
    grpo = ladder.grpo(kl=None, **settings)
    grpo = grpo._replace(loss_weights=loss_weights.per_step, collector=first_round(grpo.collector))
    assert same(one_update(ladder.dapo(max_resample_rounds=3, **settings)), one_update(grpo))


def test_refilling_where_every_group_has_signal_changes_nothing():
    policy = tiny.softmax_policy(jnp.zeros((2, 3)))
    plain = rollout.episodic(num_envs=8, group_size=4)
    refilled = rollout.with_dynamic_sampling(plain, max_resample_rounds=3, gamma=0.99)
    args = ENV, policy, jnp.zeros((2, 3)), (), jax.random.key(1)
    _, expected, stats = first_round(plain).collect(*args)
    _, got, more = refilled.collect(*args)
    assert rollout.has_signal(expected, 4, 0.99).all()
    jax.tree.map(np.testing.assert_array_equal, (got, more), (expected, stats))


def test_a_small_trust_region_step_is_the_natural_gradient():
    """F^-1 g with F the Hessian of the mean KL, computed densely; the step's length makes that KL `max_kl`."""
    max_kl, damping = 1e-4, 1e-3
    policy, critic = networks.mlp(ENV, hidden=(4,))
    policy = policy._replace(init=_bold(policy.init))
    algorithm = ladder.trpo(
        max_kl=max_kl, damping=damping, conjugate_steps=60, value_epochs=1, value_minibatches=1, **SEGMENT
    )
    objective, params, batch = tiny.first_update(ENV, policy, critic, algorithm, jax.random.key(0))
    flat, unravel = jax.flatten_util.ravel_pytree(params.policy)
    old = objective.distribution(params, batch)

    def mean_kl(flat):
        return (batch.weight * old.kl(objective.distribution(params._replace(policy=unravel(flat)), batch))).sum()

    def loss(flat):
        return objective.policy_loss(params._replace(policy=unravel(flat)), objective.as_minibatch(batch))[0]

    fisher = np.asarray(jax.jit(jax.hessian(mean_kl))(flat), np.float64) + damping * np.eye(flat.size)
    gradient = np.asarray(jax.grad(loss)(flat), np.float64)
    natural = -np.linalg.solve(fisher, gradient)
    expected = natural * np.sqrt(2 * max_kl / (natural @ fisher @ natural))

    update_ = tiny.jit(partial(algorithm.update, objective, update.sgd(), 0.0))
    after, _, metrics = update_(params, (), batch, jax.random.key(0))
    step = np.asarray(jax.flatten_util.ravel_pytree(after.policy)[0] - flat)
    assert metrics["accepted"] == 1
    assert _cosine(step, expected) > 0.999
    np.testing.assert_allclose(np.linalg.norm(step), np.linalg.norm(expected), rtol=0.02)
    assert _cosine(step, -gradient) < 0.9


def _bold(init):
    """Parameters far from the uniform policy, where the Fisher matrix is far from a multiple of the identity."""
    return lambda key: jax.tree.map(lambda x: x * (20.0 if x.shape[-1:] == (3,) else 1.0), init(key))


def _cosine(x, y):
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


LENGTHS = {"shortest": 1, "longest": 4, "time_limit": 4}


def starts(reset_pool, columns=4000, num_steps=4):
    """Lengths of the first and second episode that begin inside a segment, one pair per column."""
    env = tiny.counter(**LENGTHS)
    policy = tiny.softmax_policy(jnp.zeros((2, 3)))
    collector = rollout.continuing(num_envs=columns, num_steps=num_steps, reset_pool=reset_pool)

    def run(key):
        runner = collector.init(env, policy, policy.init(key), key)
        runner = runner._replace(env_state=tiny.Count(jnp.ones(columns, int), jnp.zeros(columns, int)))
        runner, steps, _ = collector.collect(env, policy, policy.init(key), runner, jax.random.fold_in(key, 1))
        return runner, steps.steps

    runner, steps = tiny.jit(run)(jax.random.key(3))
    lengths = np.concatenate([steps.obs[..., 0], runner.obs[None, :, 0]]).astype(int)
    lasts = np.asarray(steps.last)
    first = lengths[1]  # every column's episode ends with its first step
    where = 1 + lasts[1:].argmax(0)
    ended = lasts[1:].any(0)
    second = lengths[where + 1, np.arange(columns)]
    return first, np.where(ended, second, 0)


@pytest.mark.parametrize("reset_pool", [0, 4])
def test_start_states_from_a_pool_are_distributed_as_fresh_ones(reset_pool):
    """Each, and two in a row; four steps cannot end more than the four episodes of the pool."""
    first, second = starts(reset_pool)
    counts = np.bincount(first, minlength=5)[1:]
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    pairs = np.histogram2d(first[first < 4], second[first < 4], bins=[[1, 2, 3, 4], [1, 2, 3, 4, 5]])[0]
    assert scipy.stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_a_pool_that_is_too_small_repeats_itself():
    first, second = starts(1)
    assert (first == second)[first < 4].all()

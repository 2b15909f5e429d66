"""The record PolicyGradient, and the one learner that runs every algorithm of the ladder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpg.objectives.advantages import Credit, explained_variance
from jaxpg.objectives.kl import ReferenceKL, k3
from jaxpg.rollout.collector import Collector
from jaxpg.rollout.metrics import episode_metrics, outcome_metrics
from jaxpg.types import Actor, Array, Critic, Env, Key, Learner, Metrics, Params, Policy, Rollout, Tree
from jaxpg.update.normalization import (
    Moments,
    discounted_reward_sums,
    initial_moments,
    normalize_obs,
    scale_rewards,
    update_moments,
)
from jaxpg.update.objective import Batch, Objective
from jaxpg.vectorize import copy_tree, polyak_update


class PolicyGradient(NamedTuple):
    """A policy-gradient algorithm: what each step of an iteration does.

        rollout ~ collect(policy)
        psi_t, target_t = credit(rewards, V)
        loss = sum_t weight_t [ surrogate(log_prob_t, old_log_prob_t, normalize(psi)_t)
                                - entropy_coefficient H_t + reference KL + value_coefficient value_loss_t ]
        params <- update(loss)

    gamma: discount.
    collect: how experience is gathered (rollout.py).
    credit: what an action is held responsible for, the psi_t of Schulman et al. 2016, equation 1 (advantages.py).
    normalize: the scale of psi, per minibatch (advantages.py).
    surrogate: per-step policy loss (surrogates.py).
    loss_weights: mask -> weight of each step (objectives/loss_weights.py).
    value_loss: per-step loss of the critic (surrogates.py), None for algorithms without one.
    value_coefficient: its weight beside the policy's loss.
    entropy_coefficient: weight of the policy's entropy.
    reference_kl: KL to a reference policy, in the reward or in the loss (penalties.py), or None.
    reference_rate: the reference is the initial policy and moves this share of the way to the current one after
        every iteration.
    update: loss -> parameters (update/).
    optimizer: () -> optax transformation whose updates point uphill and know no learning rate.
    learning_rate: environment steps so far -> step size.
    """

    gamma: Array | float
    collect: Collector
    credit: Callable[..., Credit]
    normalize: Callable[[Array, Array], Array]
    surrogate: Callable[[Array, Array, Array], Array]
    loss_weights: Callable[[Array], Array]
    value_loss: Callable[[Array, Array, Array], Array] | None
    value_coefficient: Array | float
    entropy_coefficient: Array | float
    reference_kl: ReferenceKL | None
    reference_rate: Array | float
    update: Callable[..., tuple[Params, Tree, Metrics]]
    optimizer: Callable[[], optax.GradientTransformation]
    learning_rate: Callable[[Array], Array]


class Scales(NamedTuple):
    """Running moments of observations and of discounted returns, `()` where switched off."""

    observation: Moments | tuple[()]
    returns: Moments | tuple[()]


class RunnerState(NamedTuple):
    """What belongs to single environments, leaves `[B, ...]`: the collector's runner, and the discounted sum of past
    rewards where rewards are scaled.
    """

    collector: Tree
    reward_trace: Tree


class TrainState(NamedTuple):
    """All that one run carries from iteration to iteration.

    baseline: running average of returns, for the credit that uses it.
    reference: the reference policy's parameters, `()` without one.
    steps: environment steps so far, int32.
    """

    params: Params
    opt_state: Tree
    runner: RunnerState
    scales: Scales
    baseline: Array
    reference: Tree
    steps: Array


def policy_gradient(
    env: Env,
    policy: Policy,
    critic: Critic | None,
    algorithm: PolicyGradient,
    *,
    normalize_observations: bool = False,
    scale_rewards: bool = False,
) -> Learner:
    """The learner of `algorithm` on `env`.

    Args:
        env: where it learns.
        policy: what it learns.
        critic: its value function; one given to an algorithm that uses none is left alone.
        algorithm: how it learns.
        normalize_observations: put observations on the scale of their running moments.
        scale_rewards: divide rewards by the running standard deviation of the discounted return.

    Raises:
        ValueError: the algorithm has a value loss and no critic was given.
    """
    if algorithm.value_loss is not None and critic is None:
        raise ValueError("This algorithm learns a value function: pass a critic, or use one without (value_loss=None).")
    critic = critic if algorithm.value_loss is not None else None
    optimizer = algorithm.optimizer()
    objective = make_objective(policy, critic, algorithm)

    def init(key: Key) -> TrainState:
        policy_key, critic_key, runner_key = jax.random.split(key, 3)
        params = Params(policy.init(policy_key), critic.init(critic_key) if critic else ())
        shape = env.observation_space.shape
        scales = Scales(
            initial_moments(shape) if normalize_observations else (), initial_moments() if scale_rewards else ()
        )
        acting = with_normalized_obs(policy, scales)
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            runner=RunnerState(
                algorithm.collect.init(env, acting, params.policy, runner_key),
                jnp.zeros(algorithm.collect.num_envs, jnp.float32) if scale_rewards else (),
            ),
            scales=scales,
            baseline=jnp.zeros((), jnp.float32),
            reference=copy_tree(params.policy) if algorithm.reference_kl else (),
            steps=jnp.zeros((), jnp.int32),
        )

    def step(state: TrainState, key: Key) -> tuple[TrainState, Metrics]:
        collect_key, improve_key = jax.random.split(key)
        params = state.params
        acting = with_normalized_obs(policy, state.scales)
        collector, rollout, stats = algorithm.collect.collect(
            env, acting, params.policy, state.runner.collector, collect_key
        )
        rollout, trace, scales = normalize_rollout(rollout, state.runner.reward_trace, state.scales, algorithm.gamma)
        batch, credit = make_batch(policy, critic, algorithm, params, state.reference, state.baseline, rollout)
        learning_rate = algorithm.learning_rate(state.steps)
        params, opt_state, metrics = algorithm.update(
            objective, optimizer, learning_rate, params, state.opt_state, batch, improve_key
        )
        metrics |= episode_metrics(stats) | outcome_metrics(rollout.episodes.outcome) | {"learning_rate": learning_rate}
        if env.measure:
            metrics |= env.measure(rollout.episodes.outcome, rollout.episodes.length, algorithm.collect.group_size)
        if critic:
            metrics["explained_variance"] = explained_variance(batch.old_value, batch.target, rollout.loss_mask)
        state = TrainState(
            params=params,
            opt_state=opt_state,
            runner=RunnerState(collector, trace),
            scales=scales,
            baseline=credit.baseline,
            reference=polyak_update(state.reference, params.policy, algorithm.reference_rate),
            steps=state.steps + stats.steps.astype(jnp.int32),
        )
        # `steps` stays an integer: float32 counts no further than 2^24.
        return state, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()} | {"steps": state.steps}

    def actor(state: TrainState) -> Actor:
        return make_actor(with_normalized_obs(policy, state.scales), state.params.policy)

    def with_policy(state: TrainState, params: Tree) -> TrainState:
        reference = copy_tree(params) if algorithm.reference_kl else ()
        return state._replace(params=state.params._replace(policy=params), reference=reference)

    return Learner(init, step, actor, with_policy)


def make_actor(policy: Policy, params: Tree) -> Actor:
    """The actor of a policy with these parameters."""

    def act(memory: Tree, obs: Tree, key: Key, greedy: bool) -> tuple[Array, Tree]:
        distribution, memory = policy.act(params, memory, obs)
        return distribution.mode() if greedy else distribution.sample(key), memory

    return Actor(start=partial(policy.start, params), act=act)


def make_objective(policy: Policy, critic: Critic | None, algorithm: PolicyGradient) -> Objective:
    """The losses of an algorithm as functions of parameters and a batch."""

    def policy_loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        steps, weight = batch.rollout.steps, batch.weight
        distribution = policy.evaluate(params.policy, batch.rollout)
        log_prob, entropy = distribution.log_prob_and_entropy(steps.action)

        def surrogate(log_prob: Array) -> Array:
            return algorithm.surrogate(log_prob, steps.log_prob, batch.advantage)

        loss, pullback = jax.vjp(surrogate, log_prob)
        if algorithm.reference_kl and algorithm.reference_kl.in_loss:
            loss += algorithm.reference_kl.in_loss(log_prob, steps.log_prob, batch.reference_log_prob)
        # Where the surrogate has no slope, it has cut this step off: that is what "clipped" means, for any of them.
        # CISPO clips weights and keeps every slope, so by this measure it clips nothing.
        cut = (pullback(jnp.ones_like(loss))[0] == 0) & (batch.advantage != 0)
        raised = log_prob > steps.log_prob
        metrics = {
            "policy_loss": weight * loss,
            "entropy": batch.minibatch_weight * entropy,
            "approx_kl": batch.minibatch_weight * k3(steps.log_prob, log_prob),
            "clipped_high": batch.minibatch_weight * (cut & raised),
            "clipped_low": batch.minibatch_weight * (cut & ~raised),
        }
        if algorithm.reference_kl:
            metrics["reference_kl"] = batch.minibatch_weight * k3(log_prob, batch.reference_log_prob)
        total = (weight * (loss - algorithm.entropy_coefficient * entropy)).sum()
        return total, lax.stop_gradient({name: value.sum() for name, value in metrics.items()})

    return Objective(
        policy_loss=policy_loss,
        value_loss=partial(_value_loss, critic, algorithm) if critic else None,
        distribution=lambda params, batch: policy.evaluate(params.policy, batch.rollout),
        normalize=algorithm.normalize,
        needs_trajectories=policy.needs_trajectories,
    )


def _value_loss(critic: Critic, algorithm: PolicyGradient, params: Params, batch: Batch) -> tuple[Array, Metrics]:
    assert algorithm.value_loss is not None
    value, _ = critic.values(params, batch.rollout)
    loss = (batch.weight * algorithm.value_loss(value, batch.old_value, batch.target)).sum()
    return algorithm.value_coefficient * loss, {"value_loss": lax.stop_gradient(loss)}


def make_batch(
    policy: Policy,
    critic: Critic | None,
    algorithm: PolicyGradient,
    params: Params,
    reference: Tree,
    baseline: Array,
    rollout: Rollout,
) -> tuple[Batch, Credit]:
    """What the losses need to know of a rollout, computed once for all of it in large calls."""
    reference_log_prob: Tree = ()
    if algorithm.reference_kl:
        steps = rollout.steps
        reference_log_prob = policy.evaluate(reference, rollout).log_prob(steps.action)
        if algorithm.reference_kl.in_reward:
            penalty = algorithm.reference_kl.in_reward(steps.log_prob, reference_log_prob)
            rollout = rollout._replace(steps=steps._replace(reward=steps.reward + steps.mask * penalty))
    nothing = jnp.zeros_like(rollout.steps.reward)
    v_tm1, v_t = critic.values(params, rollout) if critic else (nothing, nothing)
    credit = algorithm.credit(rollout.steps, v_tm1, v_t, baseline, gamma=algorithm.gamma)
    batch = Batch(
        rollout=rollout,
        advantage=credit.advantage,
        target=credit.target,
        old_value=v_tm1,
        weight=algorithm.loss_weights(rollout.loss_mask),
        minibatch_weight=(),
        reference_log_prob=reference_log_prob,
    )
    return batch, credit


def with_normalized_obs(policy: Policy, scales: Scales) -> Policy:
    """The policy, acting on raw observations: they are standardised on the way in."""
    moments = scales.observation
    if not isinstance(moments, Moments):
        return policy
    return policy._replace(
        start=lambda params, obs: policy.start(params, normalize_obs(moments, obs)),
        act=lambda params, memory, obs: policy.act(params, memory, normalize_obs(moments, obs)),
    )


def normalize_rollout(
    rollout: Rollout, trace: Tree, scales: Scales, gamma: Array | float
) -> tuple[Rollout, Tree, Scales]:
    """The rollout on the scales that acting saw, and the scales after it."""
    steps, (observation, returns) = rollout.steps, scales
    if isinstance(observation, Moments):
        obs, final_obs = (normalize_obs(observation, x) for x in (steps.obs, rollout.final_obs))
        observation = update_moments(observation, steps.obs, steps.mask)
        steps, rollout = steps._replace(obs=obs), rollout._replace(final_obs=final_obs)
    if isinstance(returns, Moments):
        trace, sums = discounted_reward_sums(trace, steps.reward, steps.last, gamma)
        returns = update_moments(returns, sums, steps.mask)
        steps = steps._replace(reward=scale_rewards(returns, steps.reward))
    return rollout._replace(steps=steps), trace, Scales(observation, returns)

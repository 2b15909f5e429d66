"""The record PolicyGradient, and the one learner that runs every algorithm of the ladder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpg import parallel
from jaxpg.advantages import Credit
from jaxpg.improve import Batch, Objective
from jaxpg.normalization import (
    Moments,
    forward_returns,
    initial_moments,
    scaled,
    standardized,
    update_moments,
)
from jaxpg.penalties import ReferenceKL, k3
from jaxpg.rollout import Collector, Tally, mean_parts
from jaxpg.types import Actor, Array, Critic, Env, Key, Learner, Metrics, Params, Policy, Rollout, Tree


class PolicyGradient(NamedTuple):
    """A policy-gradient algorithm: what each step of an iteration does.

        rollout ~ collect(policy)
        psi_t, target_t = credit(rewards, V)
        loss = sum_t weight_t [ surrogate(log_prob_t, old_log_prob_t, normalize(psi)_t)
                                - entropy_coefficient H_t + reference KL + value_coefficient value_loss_t ]
        params <- improve(loss)

    gamma: discount.
    collect: how experience is gathered (rollout.py).
    credit: what an action is held responsible for, the psi_t of Schulman et al. 2016, equation 1 (advantages.py).
    normalize: the scale of psi, per minibatch (advantages.py).
    surrogate: per-step policy loss (surrogates.py).
    aggregate: mask -> weight of each step (aggregates.py).
    value_loss: per-step loss of the critic (surrogates.py), None for algorithms without one.
    value_coefficient: its weight beside the policy's loss.
    entropy_coefficient: weight of the policy's entropy.
    reference_kl: KL to a reference policy, in the reward or in the loss (penalties.py), or None.
    reference_rate: the reference is the initial policy and moves this share of the way to the current one after
        every iteration.
    improve: loss -> parameters (improve.py).
    optimizer: () -> optax transformation whose updates point uphill and know no learning rate.
    learning_rate: environment steps so far -> step size.
    """

    gamma: Array | float
    collect: Collector
    credit: Callable[..., Credit]
    normalize: Callable[[Array, Array], Array]
    surrogate: Callable[[Array, Array, Array], Array]
    aggregate: Callable[[Array], Array]
    value_loss: Callable[[Array, Array, Array], Array] | None
    value_coefficient: Array | float
    entropy_coefficient: Array | float
    reference_kl: ReferenceKL | None
    reference_rate: Array | float
    improve: Callable[..., tuple[Params, Tree, Metrics]]
    optimizer: Callable[[], optax.GradientTransformation]
    learning_rate: Callable[[Array], Array]


class Scales(NamedTuple):
    """Running moments of observations and of discounted returns, `()` where switched off."""

    observation: Moments | tuple[()]
    returns: Moments | tuple[()]


class Running(NamedTuple):
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
    runner: Running
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
        acting = _seeing(policy, scales)
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            runner=Running(
                algorithm.collect.init(env, acting, params.policy, runner_key),
                jnp.zeros(algorithm.collect.num_envs, jnp.float32) if scale_rewards else (),
            ),
            scales=scales,
            baseline=jnp.zeros((), jnp.float32),
            reference=copy(params.policy) if algorithm.reference_kl else (),
            steps=jnp.zeros((), jnp.int32),
        )

    def step(state: TrainState, key: Key) -> tuple[TrainState, Metrics]:
        collect_key, improve_key = jax.random.split(key)
        params = state.params
        acting = _seeing(policy, state.scales)
        collector, rollout, tally = algorithm.collect.collect(
            env, acting, params.policy, state.runner.collector, collect_key
        )
        rollout, trace, scales = _rescale(rollout, state.runner.reward_trace, state.scales, algorithm.gamma)
        batch, credit = make_batch(policy, critic, algorithm, params, state.reference, state.baseline, rollout)
        learning_rate = algorithm.learning_rate(state.steps)
        params, opt_state, metrics = algorithm.improve(
            objective, optimizer, learning_rate, params, state.opt_state, batch, improve_key
        )
        metrics |= _tally_metrics(tally) | mean_parts(rollout.outcome) | {"learning_rate": learning_rate}
        if env.measure:
            metrics |= env.measure(rollout.outcome, rollout.length, algorithm.collect.group_size)
        if critic:
            metrics["explained_variance"] = explained_variance(batch.old_value, batch.target, rollout.trains)
        state = TrainState(
            params=params,
            opt_state=opt_state,
            runner=Running(collector, trace),
            scales=scales,
            baseline=credit.baseline,
            reference=_follow(state.reference, params.policy, algorithm.reference_rate),
            steps=state.steps + tally.steps.astype(jnp.int32),
        )
        # `steps` stays an integer: float32 counts no further than 2^24.
        return state, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()} | {"steps": state.steps}

    def actor(state: TrainState) -> Actor:
        return playing(_seeing(policy, state.scales), state.params.policy)

    def adopt(state: TrainState, params: Tree) -> TrainState:
        reference = copy(params) if algorithm.reference_kl else ()
        return state._replace(params=state.params._replace(policy=params), reference=reference)

    return Learner(init, step, actor, adopt)


def playing(policy: Policy, params: Tree) -> Actor:
    """The actor of a policy with these parameters."""

    def act(memory: Tree, obs: Tree, key: Key, greedy: bool) -> tuple[Array, Tree]:
        distribution, memory = policy.act(params, memory, obs)
        return distribution.mode() if greedy else distribution.sample(key), memory

    return Actor(start=partial(policy.start, params), act=act)


def copy(params: Tree) -> Tree:
    """Buffers of their own: a state may be donated, and none must be given away twice."""
    return jax.tree.map(jnp.copy, params)


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
            "entropy": batch.share * entropy,
            "approx_kl": batch.share * k3(steps.log_prob, log_prob),
            "clipped_high": batch.share * (cut & raised),
            "clipped_low": batch.share * (cut & ~raised),
        }
        if algorithm.reference_kl:
            metrics["reference_kl"] = batch.share * k3(log_prob, batch.reference_log_prob)
        total = (weight * (loss - algorithm.entropy_coefficient * entropy)).sum()
        return total, lax.stop_gradient({name: value.sum() for name, value in metrics.items()})

    return Objective(
        policy_loss=policy_loss,
        value_loss=partial(_value_loss, critic, algorithm) if critic else None,
        distribution=lambda params, batch: policy.evaluate(params.policy, batch.rollout),
        normalize=algorithm.normalize,
        sequential=policy.sequential,
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
        weight=algorithm.aggregate(rollout.trains),
        share=(),
        reference_log_prob=reference_log_prob,
    )
    return batch, credit


def _seeing(policy: Policy, scales: Scales) -> Policy:
    """The policy, acting on raw observations: they are standardised on the way in."""
    moments = scales.observation
    if not isinstance(moments, Moments):
        return policy
    return policy._replace(
        start=lambda params, obs: policy.start(params, standardized(moments, obs)),
        act=lambda params, memory, obs: policy.act(params, memory, standardized(moments, obs)),
    )


def _rescale(rollout: Rollout, trace: Tree, scales: Scales, gamma: Array | float) -> tuple[Rollout, Tree, Scales]:
    """The rollout on the scales that acting saw, and the scales after it."""
    steps, (observation, returns) = rollout.steps, scales
    if isinstance(observation, Moments):
        obs, endings = (standardized(observation, x) for x in (steps.obs, rollout.endings))
        observation = update_moments(observation, steps.obs, steps.mask)
        steps, rollout = steps._replace(obs=obs), rollout._replace(endings=endings)
    if isinstance(returns, Moments):
        trace, sums = forward_returns(trace, steps.reward, steps.last, gamma)
        returns = update_moments(returns, sums, steps.mask)
        steps = steps._replace(reward=scaled(returns, steps.reward))
    return rollout._replace(steps=steps), trace, Scales(observation, returns)


def _follow(reference: Tree, params: Tree, rate: Array | float) -> Tree:
    if not jax.tree.leaves(reference):
        return reference
    return jax.tree.map(lambda old, new: old + rate * (new - old), reference, params)


def _tally_metrics(tally: Tally) -> Metrics:
    mean_over_episodes = 1 / jnp.where(tally.episodes > 0, tally.episodes, jnp.nan)
    return {
        "episodes": tally.episodes,
        "return": tally.return_sum * mean_over_episodes,
        "length": tally.length_sum * mean_over_episodes,
    }


def explained_variance(value: Array, target: Array, mask: Array) -> Array:
    """1 - Var[target - value] / Var[target] over the steps that train, on all devices; 0 for a constant target."""
    count = jnp.maximum(parallel.psum(mask.sum()), 1)

    def variance(x: Array) -> Array:
        mean = parallel.psum((mask * x).sum()) / count
        return parallel.psum((mask * (x - mean) ** 2).sum()) / count

    spread = variance(target)
    return jnp.where(spread > 0, 1 - variance(target - value) / jnp.where(spread > 0, spread, 1.0), 0.0)

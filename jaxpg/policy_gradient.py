"""The record PolicyGradient, and the one learner that runs every algorithm of the ladder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpg.errors import UserError
from jaxpg.models.initial_weights import in_one_loop
from jaxpg.objectives.adaptation import Adaptation
from jaxpg.objectives.advantages import Credit
from jaxpg.objectives.kl import ReferenceKL, k1, k3
from jaxpg.objectives.metrics import credit_metrics, explained_variance
from jaxpg.objectives.surrogates import PerEpisode, SurrogateLoss, episode_log_ratio, loss_and_clipped
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import Collector, CollectorState, RolloutStats, acting_params
from jaxpg.rollout.metrics import episode_metrics, outcome_metrics
from jaxpg.types import (
    Actor,
    Array,
    Box,
    Critic,
    Env,
    Experience,
    Key,
    Learner,
    Metrics,
    Params,
    Policy,
    Rollout,
    Tree,
)
from jaxpg.update.forward import forward_pass
from jaxpg.update.normalization import (
    Moments,
    discounted_reward_sums,
    initial_moments,
    initial_term_moments,
    normalize_obs,
    scale_rewards,
    standardize_rewards,
    update_moments,
)
from jaxpg.update.objective import Batch, JointLoss, Objective, TextReader
from jaxpg.vectorize import copy_tree, polyak_update, sums


class PolicyGradient(NamedTuple):
    """A policy-gradient algorithm. One iteration is

        rollout ~ collect(policy)
        psi_t, target_t = credit(rewards, V)
        loss = sum_t weight_t [ surrogate(log_prob_t, old_log_prob_t, normalize(psi)_t)
                                - entropy_coefficient H_t + reference KL + value_coefficient value_loss_t ]
        params <- update(loss)

    gamma: discount.
    collect: how experience is gathered (rollout/).
    credit: the psi_t of Schulman et al. 2016, equation 1, and the critic's targets (objectives/advantages.py).
    normalize: the scale of psi, per minibatch (objectives/advantages.py).
    surrogate: per-step loss of the policy, or a PerEpisode of one (objectives/surrogates.py).
    loss_weights: mask -> weight of each step (objectives/loss_weights.py).
    value_loss: per-step loss of the critic (objectives/surrogates.py), None for algorithms without a critic.
    value_coefficient: weight of the critic's loss.
    entropy_coefficient: weight of the policy's entropy.
    reference_kl: KL to a reference policy, in the reward or in the loss (objectives/kl.py), or None.
    reference_rate: the reference starts as the initial policy, and after every iteration moves this fraction of the way
        to the current one.
    update: loss -> parameters (update/).
    optimizer: () -> optax transformation whose updates point uphill and contain no learning rate.
    learning_rate: environment steps so far -> step size.
    adaptation: state of the algorithm, such as an adaptive weight of the KL (objectives/adaptation.py), or None.
    """

    gamma: Array | float
    collect: Collector
    credit: Callable[..., Credit]
    normalize: Callable[[Array, Array], Array]
    surrogate: Callable[[Array, Array, Array], Array] | PerEpisode
    loss_weights: Callable[[Array], Array]
    value_loss: Callable[[Array, Array, Array], Array] | None
    value_coefficient: Array | float
    entropy_coefficient: Array | float
    reference_kl: ReferenceKL | None
    reference_rate: Array | float
    update: Callable[..., tuple[Params, Tree, Metrics]]
    optimizer: Callable[[], optax.GradientTransformation]
    learning_rate: Callable[[Array], Array]
    adaptation: Adaptation | None = None


class NormalizationState(NamedTuple):
    """Running moments of observations and of discounted sums of rewards, `()` for what is not normalised.

    reward_terms: by name, those of the terms of an episode's reward that are standardised by them.
    """

    obs: Moments | tuple[()]
    reward_sums: Moments | tuple[()]
    reward_terms: Mapping[str, Moments]


class RunnerState(NamedTuple):
    """What belongs to single environments, leaves `[B, ...]`, split over devices.

    collector: the state of the collector: environments, observations, the policy's memory.
    reward_sum: discounted sum of the rewards so far in each environment, `()` where rewards are not scaled.
    """

    collector: Tree
    reward_sum: Tree


class TrainState(NamedTuple):
    """Everything that a run carries from iteration to iteration.

    baseline: running average of returns, for `advantages.mean_baseline`.
    reference: the reference policy's parameters, `()` without one.
    steps: environment steps so far, int32.
    algorithm: the state of the algorithm's adaptation, empty without one.
    """

    params: Params
    opt_state: Tree
    runner: RunnerState
    normalization: NormalizationState
    baseline: Array
    reference: Tree
    steps: Array
    algorithm: Metrics


class Parts(NamedTuple):
    """The parts of a learner that do not change during training."""

    env: Env
    policy: Policy
    critic: Critic | None
    algorithm: PolicyGradient
    objective: Objective
    optimizer: optax.GradientTransformation


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
        env: the environment.
        policy: the policy to train.
        critic: its value function; ignored by algorithms without a value loss.
        algorithm: the algorithm (ladder.py).
        normalize_observations: observations less their running mean, divided by their running standard deviation.
        scale_rewards: divide rewards by the running standard deviation of the discounted sum of rewards.

    Raises:
        ValueError: the algorithm has a value loss and no critic was given.
        UserError: observations are to be normalised and are tokens or other integers, or hold a mask of actions; the
            surrogate is of whole episodes, and the collector cuts them.
    """
    if normalize_observations and not isinstance(env.observation_space, Box):
        raise UserError(
            f"normalize_observations needs observations that are real numbers; those of {env.name} are the integers "
            f"from 0 to {env.observation_space.n - 1}, of which a mean says nothing. Set it to false."
        )
    if normalize_observations and env.action_mask:
        raise UserError(
            f"normalize_observations cannot be used on {env.name}: its observations hold the mask of allowed actions, "
            "which must stay zeros and ones. Set it to false."
        )
    if isinstance(algorithm.surrogate, PerEpisode) and not algorithm.collect.whole_episodes:
        raise UserError(
            "The surrogate is of whole episodes (PerEpisode), and the experience is collected in segments that cut "
            "them: collect with rollout.episodic, which is num_steps = none for the children of PPO."
        )
    if algorithm.value_loss is None:
        critic = None
    elif critic is None:
        raise ValueError("This algorithm learns a value function: pass a critic, or use one without (value_loss=None).")
    objective = make_objective(policy, critic, algorithm)
    parts = Parts(env, policy, critic, algorithm, objective, algorithm.optimizer())

    def actor(state: TrainState) -> Actor:
        return make_actor(with_normalized_obs(policy, state.normalization), state.params.policy)

    def with_policy(state: TrainState, params: Tree) -> TrainState:
        reference = copy_tree(params) if algorithm.reference_kl else ()
        return state._replace(params=state.params._replace(policy=params), reference=reference)

    init = partial(_init, parts, normalize_observations=normalize_observations, scale_rewards=scale_rewards)
    experience = None if env.host else Experience(env, partial(_experience, parts))  # the host checks its numbers
    return Learner(init, partial(_step, parts), actor, with_policy, experience)


def _init(parts: Parts, key: Key, *, normalize_observations: bool, scale_rewards: bool) -> TrainState:
    """New parameters, optimizer state and environments."""
    policy, critic, algorithm = parts.policy, parts.critic, parts.algorithm
    policy_key, critic_key, runner_key = jax.random.split(key, 3)
    params = in_one_loop(lambda: Params(policy.init(policy_key), critic.init(critic_key) if critic else ()))
    normalization = NormalizationState(
        obs=initial_moments(parts.env.observation_space.shape) if normalize_observations else (),
        reward_sums=initial_moments() if scale_rewards else (),
        reward_terms=initial_term_moments(parts.env.reward_terms),
    )
    acting = with_normalized_obs(policy, normalization)
    return TrainState(
        params=params,
        opt_state=parts.optimizer.init(params),
        runner=RunnerState(
            collector=algorithm.collect.init(parts.env, acting, params.policy, runner_key),
            reward_sum=jnp.zeros(algorithm.collect.num_envs, jnp.float32) if scale_rewards else (),
        ),
        normalization=normalization,
        baseline=jnp.zeros((), jnp.float32),
        reference=copy_tree(params.policy) if algorithm.reference_kl else (),
        steps=jnp.zeros((), jnp.int32),
        algorithm=algorithm.adaptation.init() if algorithm.adaptation else {},
    )


def _step(parts: Parts, state: TrainState, key: Key) -> tuple[TrainState, Metrics]:
    """One iteration: collect a rollout, credit its actions, update the parameters."""
    parts = _adapted(parts, state)
    algorithm, params = parts.algorithm, state.params
    collect_key, update_key = jax.random.split(key)
    collector, rollout, stats = _collect(parts, state, collect_key)
    rollout, term_moments, weighed = standardize_rewards(
        parts.env.reward_terms, rollout, state.normalization.reward_terms
    )
    normalization = state.normalization._replace(reward_terms=term_moments)
    rollout, reward_sum, normalization = normalize_rollout(
        rollout, state.runner.reward_sum, normalization, algorithm.gamma
    )
    batch, credit = make_batch(parts.policy, parts.critic, algorithm, params, state.reference, state.baseline, rollout)
    learning_rate = algorithm.learning_rate(state.steps)
    params, opt_state, metrics = algorithm.update(
        parts.objective, parts.optimizer, learning_rate, params, state.opt_state, batch, update_key
    )
    metrics = {**metrics, "learning_rate": learning_rate, **_rollout_metrics(parts, batch, rollout, stats), **weighed}
    metrics |= state.algorithm
    state = TrainState(
        params=params,
        opt_state=opt_state,
        runner=RunnerState(collector, reward_sum),
        normalization=normalization,
        baseline=credit.baseline,
        reference=polyak_update(state.reference, params.policy, algorithm.reference_rate),
        steps=state.steps + stats.steps.astype(jnp.int32),
        algorithm=algorithm.adaptation.update(state.algorithm, metrics) if algorithm.adaptation else {},
    )
    # `steps` stays an integer: float32 counts no further than 2^24.
    return state, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()} | {"steps": state.steps}


def _adapted(parts: Parts, state: TrainState) -> Parts:
    """The parts of this iteration: those of the algorithm as its adaptation has made it."""
    adaptation = parts.algorithm.adaptation
    if adaptation is None:
        return parts
    algorithm = adaptation.apply(parts.algorithm, state.algorithm)
    return parts._replace(algorithm=algorithm, objective=make_objective(parts.policy, parts.critic, algorithm))


def _collect(parts: Parts, state: TrainState, key: Key) -> tuple[Tree, Rollout, RolloutStats]:
    """The rollout of an iteration, with observations and rewards of the environment."""
    acting = with_normalized_obs(parts.policy, state.normalization)
    return parts.algorithm.collect.collect(parts.env, acting, state.params.policy, state.runner.collector, key)


def _experience(parts: Parts, state: TrainState, key: Key) -> tuple[Rollout, Array]:
    """What `_step` learns from; see `Experience.collect`."""
    _, rollout, _ = _collect(parts, state, jax.random.split(key)[0])
    before = state.runner.collector
    carried = isinstance(before, CollectorState)
    return rollout, before.episode_length if carried else jnp.zeros(rollout.loss_mask.shape[1], jnp.int32)


def _rollout_metrics(parts: Parts, batch: Batch, rollout: Rollout, stats: RolloutStats) -> Metrics:
    """Metrics of the experience, of what its actions are credited with, and of the critic's values for it."""
    episodes = rollout.episodes
    metrics = episode_metrics(stats) | outcome_metrics(episodes.outcome)
    metrics |= credit_metrics(batch.advantage, batch.target, rollout.loss_mask)
    if parts.env.measure:
        group_size = parts.algorithm.collect.group_size
        metrics |= parts.env.measure(episodes.outcome, episodes.length, group_size)
    if parts.algorithm.adaptation and parts.algorithm.reference_kl:
        log_ratio = k1(rollout.steps.log_prob, batch.reference_log_prob)
        total, count = (rollout.steps.mask * log_ratio).sum(), rollout.steps.mask.max(0).sum()
        metrics["episode_reference_kl"] = collectives.psum(total) / collectives.psum(count)
    if parts.critic:
        metrics["explained_variance"] = explained_variance(batch.old_value, batch.target, rollout.loss_mask)
    return metrics


def make_actor(policy: Policy, params: Tree) -> Actor:
    """The actor of a policy with these parameters."""
    params = acting_params(policy, params)

    def act(memory: Tree, obs: Tree, key: Key, greedy: bool) -> tuple[Array, Tree]:
        distribution, memory = policy.act(collectives.whole(params), memory, obs)
        return distribution.mode() if greedy else distribution.sample(key), memory

    return Actor(start=partial(policy.start, params), act=act)


def make_objective(policy: Policy, critic: Critic | None, algorithm: PolicyGradient) -> Objective:
    """The losses of an algorithm as functions of parameters and a batch."""
    policy_loss = partial(_policy_loss, policy, algorithm)
    value_loss = partial(_value_loss, critic, algorithm) if critic else None
    both, joint_loss = _evaluated_together(policy, critic), None
    if both and value_loss:
        joint_loss = JointLoss((policy_loss, value_loss), partial(_joint_loss, both, algorithm))
    return Objective(
        policy_loss=policy_loss,
        value_loss=value_loss,
        distribution=partial(_distribution, policy),
        normalize=algorithm.normalize,
        needs_trajectories=needs_trajectories(policy, algorithm),
        padded=algorithm.collect.whole_episodes,
        texts=policy.evaluates_from_context,
        text_reader=None if isinstance(algorithm.surrogate, PerEpisode) else _text_reader(policy, critic, algorithm),
        noise=policy.noise,
        joint_loss=joint_loss,
    )


def needs_trajectories(policy: Policy, algorithm: PolicyGradient) -> bool:
    """Whether minibatches have to consist of whole columns: the policy or the loss reads them in one piece."""
    return policy.needs_trajectories or isinstance(algorithm.surrogate, PerEpisode)


def _text_reader(policy: Policy, critic: Critic | None, algorithm: PolicyGradient) -> TextReader | None:
    """How these networks read texts side by side, None if one of them cannot. A critic reads a text with its prompt."""
    networks = policy.evaluates_packed and (critic is None or critic.evaluates_packed)
    if not networks or not algorithm.collect.whole_episodes:
        return None
    read_prompts = None
    if policy.read_prompts and critic is None:
        read_prompts = partial(_of_policy, policy.read_prompts)
    return TextReader(algorithm.collect.group_size, read_prompts)


def _of_policy(function: Callable[..., Any], params: Params, *arguments: Any) -> Any:
    """A function of the policy's parameters, given all of them."""
    return function(params.policy, *arguments)


def _distribution(policy: Policy, params: Params, batch: Batch) -> Any:
    """The policy's distribution over actions, `[T, B]`, with the noise of the batch where the policy has some."""
    noise = (batch.noise,) if policy.noise else ()
    return policy.evaluate(params.policy, batch.rollout, *noise)


def _evaluated_together(policy: Policy, critic: Critic | None) -> Callable[..., tuple[Any, Array]] | None:
    """`WithPolicy.both` of this policy and this critic; None for two that do not belong together, and with noise."""
    found = critic.with_policy if critic else None
    if found is None or critic is None or policy.noise:
        return None
    return found.both if found.evaluate is policy.evaluate and found.values is critic.values else None


def _joint_loss(
    both: Callable[..., tuple[Any, Array]], algorithm: PolicyGradient, params: Params, batch: Batch
) -> tuple[Array, Metrics]:
    """`_policy_loss` plus `_value_loss`, of networks that are evaluated together."""
    distribution, value = both(params, batch.rollout)
    policy_loss, metrics = _loss_of_distribution(algorithm, batch, distribution)
    value_loss, value_metrics = _loss_of_value(algorithm, batch, value)
    return policy_loss + value_loss, {**metrics, **value_metrics}


def _policy_loss(policy: Policy, algorithm: PolicyGradient, params: Params, batch: Batch) -> tuple[Array, Metrics]:
    return _loss_of_distribution(algorithm, batch, _distribution(policy, params, batch))


def _loss_of_distribution(algorithm: PolicyGradient, batch: Batch, distribution: Any) -> tuple[Array, Metrics]:
    """sum_t weight_t (surrogate_t + KL_t - entropy_coefficient H_t), and metrics of it."""
    steps, kl = batch.rollout.steps, algorithm.reference_kl
    log_prob, entropy = distribution.log_prob_and_entropy(steps.action)
    surrogate = _surrogate_loss(algorithm, batch, log_prob)
    loss = surrogate.loss
    if kl and kl.in_loss:
        loss += kl.in_loss(log_prob, steps.log_prob, batch.reference_log_prob)
    means = {
        "entropy": entropy,
        "approx_kl": k3(steps.log_prob, log_prob),
        "clipped_high": surrogate.clipped_high,
        "clipped_low": surrogate.clipped_low,
    }
    if kl:
        means["reference_kl"] = k3(log_prob, batch.reference_log_prob)
    terms = {name: batch.minibatch_weight * x for name, x in means.items()}
    metrics = sums(terms | {"policy_loss": batch.weight * loss})
    total = (batch.weight * (loss - algorithm.entropy_coefficient * entropy)).sum()
    return total, lax.stop_gradient(metrics)


def _surrogate_loss(algorithm: PolicyGradient, batch: Batch, log_prob: Array) -> SurrogateLoss:
    steps, surrogate = batch.rollout.steps, algorithm.surrogate
    if not isinstance(surrogate, PerEpisode):
        return loss_and_clipped(surrogate, log_prob, steps.log_prob, batch.advantage)
    log_ratio = episode_log_ratio(log_prob, steps.log_prob, steps.mask)
    return loss_and_clipped(surrogate.surrogate, log_ratio, jnp.zeros_like(log_ratio), batch.advantage)


def _value_loss(critic: Critic, algorithm: PolicyGradient, params: Params, batch: Batch) -> tuple[Array, Metrics]:
    return _loss_of_value(algorithm, batch, critic.values(params, batch.rollout)[0])


def _loss_of_value(algorithm: PolicyGradient, batch: Batch, value: Array) -> tuple[Array, Metrics]:
    """value_coefficient sum_t weight_t value_loss_t, and that sum as a metric."""
    assert algorithm.value_loss is not None
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
    """What the losses read, computed once for the whole rollout: values, credit, weights, reference log-probabilities.

    A KL in the reward is subtracted from the rewards of the batch before they are credited.
    """
    reference_log_prob: Tree = ()
    if algorithm.reference_kl:
        steps, reader = rollout.steps, _text_reader(policy, None, algorithm)
        reference_log_prob = forward_pass(partial(_log_prob, policy), reader, Params(reference, ()), rollout)
        if algorithm.reference_kl.in_reward:
            penalty = algorithm.reference_kl.in_reward(steps.log_prob, reference_log_prob)
            rollout = rollout._replace(steps=steps._replace(reward=steps.reward + steps.mask * penalty))
    zeros = jnp.zeros_like(rollout.steps.reward)
    v_tm1, v_t = zeros, zeros
    if critic:
        v_tm1, v_t = forward_pass(critic.values, _text_reader(policy, critic, algorithm), params, rollout)
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


def _log_prob(policy: Policy, params: Params, rollout: Rollout) -> Array:
    """log pi(a_t | s_t) of the actions that were taken, `[T, B]`."""
    return policy.evaluate(params.policy, rollout).log_prob(rollout.steps.action)


def with_normalized_obs(policy: Policy, normalization: NormalizationState) -> Policy:
    """The policy, acting on normalised observations; unchanged if observations are not normalised."""
    moments = normalization.obs
    if not isinstance(moments, Moments):
        return policy
    return policy._replace(
        start=lambda params, obs: policy.start(params, normalize_obs(moments, obs)),
        act=lambda params, memory, obs: policy.act(params, memory, normalize_obs(moments, obs)),
    )


def normalize_rollout(
    rollout: Rollout, reward_sum: Tree, normalization: NormalizationState, gamma: Array | float
) -> tuple[Rollout, Tree, NormalizationState]:
    """The rollout with normalised observations and scaled rewards; the new sums of rewards `[B]`, and the new moments.

    Observations are normalised by the moments from before the rollout, as the policy that acted saw them.
    """
    steps, obs_moments, sum_moments = rollout.steps, normalization.obs, normalization.reward_sums
    if isinstance(obs_moments, Moments):
        obs, final_obs = (normalize_obs(obs_moments, x) for x in (steps.obs, rollout.final_obs))
        obs_moments = update_moments(obs_moments, steps.obs, steps.mask)
        steps, rollout = steps._replace(obs=obs), rollout._replace(final_obs=final_obs)
    if isinstance(sum_moments, Moments):
        reward_sum, sums = discounted_reward_sums(reward_sum, steps.reward, steps.last, gamma)
        sum_moments = update_moments(sum_moments, sums, steps.mask)
        steps = steps._replace(reward=scale_rewards(sum_moments, steps.reward))
    moments = normalization._replace(obs=obs_moments, reward_sums=sum_moments)
    return rollout._replace(steps=steps), reward_sum, moments

"""The one learner that runs every algorithm of the ladder."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpg.algorithm import PolicyGradient, make_batch, make_objective
from jaxpg.algorithm_checks import (
    check_actions,
    check_adaptation_state,
    check_adapted,
    check_learning_rate,
    check_metric_names,
    check_normalization,
    check_records,
    check_update,
)
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.models.initial_weights import in_one_loop
from jaxpg.objectives.adaptation import Adaptation
from jaxpg.objectives.kl import k1
from jaxpg.objectives.metrics import credit_metrics, explained_variance
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import CollectorState, RolloutStats, make_actor
from jaxpg.rollout.metrics import episode_metrics, logged, outcome_metrics
from jaxpg.types import (
    Actor,
    Array,
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
    space_struct,
)
from jaxpg.update.normalization import (
    NormalizationState,
    initial_moments,
    initial_term_moments,
    normalize_rollout,
    standardize_rewards,
    with_normalized_obs,
)
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.optimizers import checked_optimizer
from jaxpg.vectorize import copy_tree, polyak_update

__all__ = ["Parts", "PolicyGradient", "RunnerState", "TrainState", "policy_gradient"]


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
        normalize_observations: observations less their running mean, divided by their running standard deviation,
            which are in the state of the learner and not among the parameters of a policy: a reference policy sees
            what the policy sees.
        scale_rewards: divide rewards by the running standard deviation of the discounted sum of rewards.

    Raises:
        ValueError: the algorithm has a value loss and no critic was given.
        UserError: one of them is no record of its kind, such as a name, or a field of the algorithm no function;
            observations are to be normalised and are tokens or other integers, or hold a mask of actions;
            surrogate, credit or weights are of whole episodes, and the collector cuts them; or the updates of the
            optimizer have the sign in them. `init` raises one if the policy's observations or actions are not those of
            the environment.
    """
    check_records(env, policy, critic, algorithm)
    if normalize_observations:
        check_normalization(env)
    if algorithm.value_loss is None:
        critic = None
    elif critic is None:
        raise ValueError("This algorithm learns a value function: pass a critic, or use one without (value_loss=None).")
    objective = make_objective(policy, critic, algorithm)
    key = jax.random.key(0)  # for shapes alone
    optimizer = checked_optimizer(algorithm.optimizer, partial(_init_params, policy, critic, key, key))
    parts = Parts(env, policy, critic, algorithm, objective, optimizer)

    def actor(state: TrainState) -> Actor:
        return make_actor(with_normalized_obs(env, policy, state.normalization), state.params.policy)

    def with_policy(state: TrainState, params: Tree) -> TrainState:
        reference = copy_tree(params) if algorithm.reference_kl else ()
        policy = copy_tree(params)  # a state may be donated, and they are the caller's
        return state._replace(params=state.params._replace(policy=policy), reference=reference)

    init = partial(_init, parts, normalize_observations=normalize_observations, scale_rewards=scale_rewards)
    experience = None if env.host else Experience(env, partial(_experience, parts))  # the host checks its numbers
    return Learner(init, partial(_step, parts), actor, with_policy, experience)


def _init_params(policy: Policy, critic: Critic | None, policy_key: Key, critic_key: Key) -> Params:
    return Params(policy.init(policy_key), critic.init(critic_key) if critic else ())


def _init(parts: Parts, key: Key, *, normalize_observations: bool, scale_rewards: bool) -> TrainState:
    """New parameters, optimizer state and environments."""
    policy, critic, algorithm = parts.policy, parts.critic, parts.algorithm
    policy_key, critic_key, runner_key = jax.random.split(key, 3)
    params = in_one_loop(partial(_init_params, policy, critic), policy_key, critic_key)
    normalization = NormalizationState(
        obs=initial_moments(space_struct(parts.env.observation_space)) if normalize_observations else (),
        reward_sums=initial_moments() if scale_rewards else (),
        reward_terms=initial_term_moments(parts.env.reward_terms),
    )
    acting = with_normalized_obs(parts.env, policy, normalization)
    collector = algorithm.collector.init(parts.env, acting, params.policy, runner_key)
    check_actions(parts.env, acting, params.policy, collector)
    return TrainState(
        params=params,
        opt_state=parts.optimizer.init(params),
        runner=RunnerState(
            collector=collector,
            reward_sum=jnp.zeros(algorithm.collector.num_envs, jnp.float32) if scale_rewards else (),
        ),
        normalization=normalization,
        baseline=jnp.zeros((), jnp.float32),
        reference=copy_tree(params.policy) if algorithm.reference_kl else (),
        steps=jnp.zeros((), jnp.int32),
        algorithm=_as_state(algorithm.adaptation.init()) if algorithm.adaptation else {},
    )


def _step(parts: Parts, state: TrainState, key: Key) -> tuple[TrainState, Metrics]:
    """One iteration: collect a rollout, credit its actions, update the parameters."""
    parts = _adapted(parts, state)
    algorithm, params = parts.algorithm, state.params
    # The third key is not used: random-number code is compiled for every number of keys, and `_init` makes three
    # (benchmarks/LOG.md, "keys by threes").
    collect_key, update_key, _ = jax.random.split(key, 3)
    collector, rollout, stats = _collect(parts, state, collect_key)
    rollout, term_moments, weighted = standardize_rewards(
        parts.env.reward_terms, rollout, state.normalization.reward_terms
    )
    normalization = state.normalization._replace(reward_terms=term_moments)
    rollout, reward_sum, normalization = normalize_rollout(
        rollout, state.runner.reward_sum, normalization, algorithm.gamma
    )
    batch, credit = make_batch(parts.policy, parts.critic, algorithm, params, state.reference, state.baseline, rollout)
    learning_rate = algorithm.learning_rate(state.steps)
    check_learning_rate(learning_rate)
    result = algorithm.update(
        parts.objective, parts.optimizer, learning_rate, params, state.opt_state, batch, update_key
    )
    check_update(result)
    params, opt_state, of_update = result
    metrics = {"learning_rate": learning_rate, **_rollout_metrics(parts, batch, rollout, stats), **weighted}
    check_metric_names("The update of an algorithm", of_update, metrics)
    metrics |= of_update
    check_metric_names("The state of an adaptation", state.algorithm, metrics)
    metrics |= state.algorithm
    steps = state.steps + stats.steps.astype(jnp.int32)
    state = TrainState(
        params=params,
        opt_state=opt_state,
        runner=RunnerState(collector, reward_sum),
        normalization=normalization,
        baseline=credit.baseline,
        reference=polyak_update(state.reference, params.policy, algorithm.reference_rate),
        steps=steps,
        algorithm=_after_iteration(algorithm.adaptation, state.algorithm, metrics | {"steps": steps}),
    )
    return state, logged(metrics, state.steps)


def _as_state(given: Metrics) -> Metrics:
    """The state that an adaptation gave, in float32."""
    check_adaptation_state(given)
    return {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}


def _after_iteration(adaptation: Adaptation | None, state: Metrics, metrics: Metrics) -> Metrics:
    """The state of an adaptation after an iteration with these metrics."""
    if adaptation is None:
        return state
    try:
        new = _as_state(adaptation.update(state, metrics))
    except KeyError as error:
        if error.args[0] in metrics:
            raise
        refuse_unknown("metric", error.args[0], metrics, " for the adaptation of this algorithm")
    if new.keys() != state.keys():
        raise UserError(
            f"The update of an adaptation must keep the numbers that its init gave, {sorted(state)}, and gives "
            f"{sorted(new)}."
        )
    return new


def _adapted(parts: Parts, state: TrainState) -> Parts:
    """The parts of this iteration: those of the algorithm as its adaptation has made it."""
    adaptation = parts.algorithm.adaptation
    if adaptation is None:
        return parts
    algorithm = adaptation.apply(parts.algorithm, state.algorithm)
    check_adapted(parts.algorithm, algorithm)
    return parts._replace(algorithm=algorithm, objective=make_objective(parts.policy, parts.critic, algorithm))


def _collect(parts: Parts, state: TrainState, key: Key) -> tuple[Tree, Rollout, RolloutStats]:
    """The rollout of an iteration, with observations and rewards of the environment."""
    acting = with_normalized_obs(parts.env, parts.policy, state.normalization)
    return parts.algorithm.collector.collect(parts.env, acting, state.params.policy, state.runner.collector, key)


def _experience(parts: Parts, state: TrainState, key: Key) -> tuple[Rollout, Array]:
    """What `_step` learns from; see `Experience.collect`."""
    _, rollout, _ = _collect(parts, state, jax.random.split(key, 3)[0])
    before = state.runner.collector
    carried = isinstance(before, CollectorState)
    return rollout, before.episode_length if carried else jnp.zeros(rollout.loss_mask.shape[1], jnp.int32)


def _rollout_metrics(parts: Parts, batch: Batch, rollout: Rollout, stats: RolloutStats) -> Metrics:
    """Metrics of the experience, of what its actions are credited with, and of the critic's values for it."""
    episodes = rollout.episodes
    metrics = episode_metrics(stats) | outcome_metrics(episodes.outcome)
    metrics |= credit_metrics(batch.advantage, batch.target, rollout.loss_mask)
    if parts.env.measure:
        group_size = parts.algorithm.collector.group_size
        metrics |= parts.env.measure(episodes.outcome, episodes.length, group_size)
    if parts.algorithm.adaptation and parts.algorithm.reference_kl and parts.algorithm.collector.whole_episodes:
        log_ratio = k1(rollout.steps.log_prob, batch.reference_log_prob)
        mask = rollout.steps.mask
        total, count = jnp.where(mask > 0, log_ratio, 0).sum(), mask.max(0).sum()
        metrics["episode_reference_kl"] = collectives.psum(total) / collectives.psum(count)
    if parts.critic:
        metrics["explained_variance"] = explained_variance(batch.old_value, batch.target, rollout.loss_mask)
    return metrics

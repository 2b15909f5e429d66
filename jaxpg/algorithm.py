"""The record PolicyGradient, and what an algorithm makes of a rollout: a batch, and the losses of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import lax

from jaxpg.errors import UserError, excerpt
from jaxpg.objectives.adaptation import Adaptation
from jaxpg.objectives.advantages import Credit
from jaxpg.objectives.kl import ReferenceKL, k3
from jaxpg.objectives.surrogates import PerEpisode, SurrogateLoss, episode_log_ratio, loss_and_clipped
from jaxpg.rollout.collector import Collector
from jaxpg.types import Array, Critic, Metrics, Params, Policy, Rollout, Tree
from jaxpg.update.forward import forward_pass
from jaxpg.update.objective import Batch, JointLoss, Objective, TextReader, per_step
from jaxpg.vectorize import sums


class PolicyGradient(NamedTuple):
    """A policy-gradient algorithm. One iteration is

        rollout ~ collect(policy)
        psi_t, target_t = credit(rewards, V)
        loss = sum_t weight_t [ surrogate(log_prob_t, old_log_prob_t, normalize(psi)_t)
                                - entropy_coefficient H_t + reference KL + value_coefficient value_loss_t ]
        params <- update(loss)

    gamma: discount.
    collector: how experience is gathered (rollout/).
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
    collector: Collector
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
        padded=algorithm.collector.whole_episodes,
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
    if not networks or not algorithm.collector.whole_episodes:
        return None
    read_prompts = None
    if policy.read_prompts and critic is None:
        read_prompts = partial(_of_policy, policy.read_prompts)
    return TextReader(algorithm.collector.group_size, read_prompts)


def _of_policy(function: Callable[..., Any], params: Params, *arguments: Any) -> Any:
    """A function of the policy's parameters, given all of them."""
    return function(params.policy, *arguments)


def _distribution(policy: Policy, params: Params, batch: Batch) -> Any:
    """The policy's distribution over actions, `[T, B]`, with the noise of the batch where the policy has some."""
    noise = (batch.noise,) if policy.noise else ()
    return policy.evaluate(params.policy, batch.rollout, *noise)


def _evaluated_together(policy: Policy, critic: Critic | None) -> Callable[..., tuple[Any, Array]] | None:
    """`JointEvaluation.both` of this policy and critic; None for two that do not belong together, and with noise."""
    found = critic.joint if critic else None
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
    log_prob = per_step("policy's log_prob", log_prob, batch.weight)
    entropy = per_step("policy's entropy", entropy, batch.weight)
    if algorithm.collector.whole_episodes:
        log_prob, batch = _without_ratios_of_nothing(log_prob, batch)
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


def _without_ratios_of_nothing(log_prob: Array, batch: Batch) -> tuple[Array, Batch]:
    """With ratios of 1 where nothing counts: after the end of an episode, and in the prompts of packed texts.

    No actions were drawn there, so a ratio may be infinite, and 0 times infinity is NaN.
    """
    counts = batch.weight != 0
    log_prob = jnp.where(counts, log_prob, batch.rollout.steps.log_prob)
    reference = batch.reference_log_prob
    if isinstance(reference, tuple):  # there is none
        return log_prob, batch
    return log_prob, batch._replace(reference_log_prob=jnp.where(counts, reference, log_prob))


def _surrogate_loss(algorithm: PolicyGradient, batch: Batch, log_prob: Array) -> SurrogateLoss:
    steps, given = batch.rollout.steps, algorithm.surrogate
    of_ratio = given.surrogate if isinstance(given, PerEpisode) else given

    def surrogate(log_prob: Array, old_log_prob: Array, advantage: Array) -> Array:
        return per_step("algorithm's surrogate", of_ratio(log_prob, old_log_prob, advantage), log_prob)

    if of_ratio is given:
        return loss_and_clipped(surrogate, log_prob, steps.log_prob, batch.advantage)
    log_ratio = episode_log_ratio(log_prob, steps.log_prob, steps.mask)
    return loss_and_clipped(surrogate, log_ratio, jnp.zeros_like(log_ratio), batch.advantage)


def _value_loss(critic: Critic, algorithm: PolicyGradient, params: Params, batch: Batch) -> tuple[Array, Metrics]:
    return _loss_of_value(algorithm, batch, critic.values(params, batch.rollout)[0])


def _loss_of_value(algorithm: PolicyGradient, batch: Batch, value: Array) -> tuple[Array, Metrics]:
    """value_coefficient sum_t weight_t value_loss_t, and that sum as a metric."""
    assert algorithm.value_loss is not None
    errors = per_step("algorithm's value_loss", algorithm.value_loss(value, batch.old_value, batch.target), value)
    loss = (batch.weight * errors).sum()
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

    A KL in the reward is subtracted from the rewards of the batch before they are credited. Ratios of whole episodes,
    whose clip range is some ten thousandths wide, are to the log-probabilities of `evaluate` where the policy acted in
    half precision: by its own, a third of the steps would be outside before anything is learned.
    """
    reference_log_prob: Tree = ()
    log_prob, reader = partial(_log_prob, policy), _text_reader(policy, None, algorithm)
    if policy.acts_rounded and isinstance(algorithm.surrogate, PerEpisode):
        learners = forward_pass(log_prob, reader, params, rollout)
        rollout = rollout._replace(steps=rollout.steps._replace(log_prob=learners))
    if algorithm.reference_kl:
        steps = rollout.steps
        by_steps = algorithm.collector.whole_episodes and not policy.needs_trajectories
        reference_log_prob = forward_pass(log_prob, reader, Params(reference, ()), rollout, padded_steps=by_steps)
        if algorithm.reference_kl.in_reward:
            penalty = algorithm.reference_kl.in_reward(steps.log_prob, reference_log_prob)
            penalty = jnp.where(steps.mask > 0, penalty, 0)  # it may be infinite at padding, whose action is none
            rollout = rollout._replace(steps=steps._replace(reward=steps.reward + penalty))
    zeros = jnp.zeros_like(rollout.steps.reward)
    v_tm1, v_t = zeros, zeros
    if critic:
        v_tm1, v_t = _values(critic, _text_reader(policy, critic, algorithm), params, rollout)
    credit = algorithm.credit(rollout.steps, v_tm1, v_t, baseline, gamma=algorithm.gamma)
    if not isinstance(credit, Credit):
        raise UserError(f"The algorithm's credit must give an advantages.Credit, not a {type(credit).__name__}.")
    if credit.baseline is None or jnp.shape(credit.baseline) != ():
        raise UserError(f"The baseline of a Credit is one number, not {excerpt(credit.baseline)}.")
    batch = Batch(
        rollout=rollout,
        advantage=per_step("algorithm's credit", credit.advantage, zeros),
        target=per_step("algorithm's credit's target", credit.target, zeros) if algorithm.value_loss else credit.target,
        old_value=v_tm1,
        weight=per_step("algorithm's loss_weights", algorithm.loss_weights(rollout.loss_mask), zeros),
        minibatch_weight=(),
        reference_log_prob=reference_log_prob,
    )
    return batch, credit._replace(baseline=jnp.asarray(credit.baseline, baseline.dtype))


def _values(critic: Critic, reader: TextReader | None, params: Params, rollout: Rollout) -> tuple[Array, Array]:
    """V of the observations and V of their successors, `[T, B]` each."""
    found = forward_pass(critic.values, reader, params, rollout)
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(
            "The values of a Critic are a pair, V of the observations and V of their successors, as "
            f"rollout.rollout_values makes them, not {excerpt(found)}."
        )
    v_tm1, v_t = (per_step("critic's values", x, rollout.steps.reward) for x in found)
    return v_tm1, v_t


def _log_prob(policy: Policy, params: Params, rollout: Rollout) -> Array:
    """log pi(a_t | s_t) of the actions that were taken, `[T, B]`."""
    return policy.evaluate(params.policy, rollout).log_prob(rollout.steps.action)

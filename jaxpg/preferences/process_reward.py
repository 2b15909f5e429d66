"""The process reward model: how probable it is that a step of a completion is right, learned from labelled steps."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.envs.text import Task
from jaxpg.errors import check_record
from jaxpg.models.generation import one_completion
from jaxpg.models.language_model import RewardModel
from jaxpg.preferences.reward_model import refuse_actor, replace_head
from jaxpg.preferences.step_labels import StepLabels, label_rollout
from jaxpg.preferences.supervised import SupervisedBatch, SupervisedSettings, supervised
from jaxpg.types import Array, Key, Learner, Metrics, Params, Rollout, Scalar, Tree


class StepAccuracy(NamedTuple):
    """How often a process reward model agrees with labels of held-out steps, [] each.

    accuracy: over all steps.
    right, wrong: over the right and over the wrong ones; NaN where there are none.
    """

    accuracy: Array
    right: Array
    wrong: Array


def process_reward_model(
    labels: StepLabels,
    model: RewardModel,
    *,
    batch_size: int = 64,
    learning_rate: Scalar = 1e-3,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
) -> Learner:
    """A process reward model from labelled steps (Lightman et al. 2023, section 2.6; Wang et al. 2024, equation 2).

        loss = -1/N Σ_j [ y_j log σ(s_j) + (1 - y_j) log(1 - σ(s_j)) ]  over the N steps of the batch

    s_j is the model's output at the token that ends step j, so σ(s_j) is the probability that the step is right, judged
    by all that comes before its end. Its parameters are `Params.critic`; `Params.policy` is empty. Where a policy
    writes the completions, `Learner.with_policy` gives its parameters, and the model starts from them too, with a head
    of its own; before, completions are those of random weights.

    Args:
        labels: the source of completions with labelled steps.
        model: the reward model to train.
        batch_size: completions per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: compute the gradient in this many parts of the batch, one at a time; the result is the same.

    Raises:
        UserError: labels or a model that are none, a batch that cannot be cut into equal parts; `Learner.actor` was
            called, as it has no policy.
    """
    check_record("process_reward_model", labels, StepLabels, "preferences.make_step_labels(...)")
    check_record("process_reward_model", model, RewardModel, "language.transformer_reward_model(env)")
    policy = labels.policy

    def draw(writer: Tree, keys: Array) -> Rollout:
        return label_rollout(jax.vmap(lambda key: labels.draw(writer, key))(keys), end=labels.end)

    def loss(params: Params, _: Tree, batch: SupervisedBatch) -> tuple[Array, Metrics]:
        score, label = model.token_scores(params.critic, batch.rollout), batch.rollout.steps.reward
        agrees = ((score > 0) == (label > 0.5)).astype(jnp.float32)
        total = (batch.weight * step_cross_entropy(score, label)).sum()
        return total, {"loss": total, "accuracy": (batch.weight * agrees).sum()}

    return supervised(
        lambda key: Params((), model.init(key)),
        draw,
        loss,
        refuse_actor,
        SupervisedSettings(batch_size, learning_rate, anneal_steps, max_grad_norm, micro_batches),
        from_policy=lambda params, policy: Params((), replace_head(policy, params.critic)),
        init_reference=None if policy is None else lambda _, key: policy.init(jax.random.fold_in(key, 1)),
    )


def step_cross_entropy(score: Array, label: Array) -> Array:
    """-y log σ(s) - (1 - y) log(1 - σ(s)), elementwise, for labels from 0 to 1."""
    return jax.nn.softplus(score) - label * score


def held_out_step_accuracy(
    labels: StepLabels, model: RewardModel, params: Tree, writer: Tree, key: Key, *, num_completions: int = 256
) -> StepAccuracy:
    """How often σ(s) > 1/2 where a held-out step is right, and <= 1/2 where it is wrong.

    `params` and `writer` are `state.params.critic` and `state.reference` of a `process_reward_model`.
    """
    keys = jax.random.split(key, num_completions)
    rollout = label_rollout(jax.vmap(lambda key: labels.held_out(writer, key))(keys), end=labels.end)
    right = rollout.steps.reward > 0.5
    agrees = (model.token_scores(params, rollout) > 0) == right
    steps = rollout.loss_mask > 0

    def share(of: Array) -> Array:
        return (agrees & of).sum() / jnp.where(of.any(), of.sum(), jnp.nan)

    return StepAccuracy(share(steps), share(steps & right), share(steps & ~right))


def judged_by_model(task: Task, model: RewardModel, params: Tree) -> Task:
    """The task, whose steps are no longer checked but judged by a process reward model: σ(s) at the end of each.

    Args:
        task: a task whose completions have steps.
        model: the reward model.
        params: its parameters, such as `state.params.critic` of `process_reward_model`; they are not trained.
    """

    def check_steps(problem: Tree, tokens: Array, length: Array) -> Array:
        rollout = one_completion(task.prompt(problem), tokens, end=task.vocabulary.end)
        return jax.nn.sigmoid(model.token_scores(params, rollout)[:, 0])

    return task._replace(check_steps=check_steps)

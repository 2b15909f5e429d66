"""Supervised fine-tuning: a policy learns to write a task's demonstrations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpg.envs.text import Task
from jaxpg.errors import check_record
from jaxpg.models.generation import completion_rollout, evaluate_completions
from jaxpg.preferences.supervised import SupervisedBatch, SupervisedSettings, supervised
from jaxpg.rollout import make_actor
from jaxpg.types import Array, Key, Learner, Metrics, Params, Policy, Prompt, Rollout, Scalar, Tree


def sft(
    task: Task,
    policy: Policy,
    *,
    batch_size: int = 64,
    learning_rate: Scalar = 1e-3,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
) -> Learner:
    """Supervised fine-tuning on a task's demonstrations (Ouyang et al. 2022, section 3.5).

        loss = -1/N Σ_t log π(y_t | x, y_<t)  over the N completion tokens of the batch

    The end token of a completion counts, prompt and padding do not. Padding is recognised by its position after the
    end, because in some vocabularies the end and the padding are the same token.

    Args:
        task: the source of problems and their demonstrations.
        policy: the policy to train.
        batch_size: demonstrations per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: compute the gradient in this many parts of the batch, one at a time; the result is the same.

    Raises:
        UserError: a task or a policy that is none, demonstrations that do not fit into max_tokens, a batch that cannot
            be cut into equal parts.
    """
    check_record("sft", task, Task, 'envs.make_task("sort")')
    check_record("sft", policy, Policy, "the first of language.transformer(env)")
    task.check_demonstrations()

    def example(key: Key) -> tuple[Prompt, Array]:
        draw_key, demonstration_key = jax.random.split(key)
        problem = task.draw(draw_key)
        return task.prompt(problem), task.demonstration(problem, demonstration_key)

    def draw(_: Tree, keys: Array) -> Rollout:
        return completion_rollout(*jax.vmap(example)(keys), end=task.vocabulary.end)

    def loss(params: Params, _: Tree, batch: SupervisedBatch) -> tuple[Array, Metrics]:
        distribution = evaluate_completions(policy, params.policy, batch.rollout, batch.noise)
        log_prob, entropy = distribution.log_prob_and_entropy(batch.rollout.steps.action)
        total = -_weighted_sum(batch.weight, log_prob)
        return total, {"loss": total, "entropy": _weighted_sum(batch.weight, entropy)}

    return supervised(
        lambda key: Params(policy.init(key), ()),
        draw,
        loss,
        lambda params: make_actor(policy, params.policy),
        SupervisedSettings(batch_size, learning_rate, anneal_steps, max_grad_norm, micro_batches),
        noise=policy.noise,
    )


def _weighted_sum(weight: Array, x: Array) -> Array:
    """Σ weight x; where the weight is 0, x is ignored, NaN too."""
    return (weight * jnp.where(weight > 0, x, 0.0)).sum()

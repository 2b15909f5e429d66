"""Supervised fine-tuning: a policy learns to write what demonstrations say."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpg.envs.text import Task
from jaxpg.models.generation import completion_rollout
from jaxpg.policy_gradient import make_actor
from jaxpg.preferences.supervised import SupervisedBatch, supervised
from jaxpg.types import Array, Key, Learner, Metrics, Params, Policy, Prompt, Rollout, Tree


def sft(
    task: Task,
    policy: Policy,
    *,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    anneal_steps: int | None = None,
    max_grad_norm: float | None = 1.0,
    micro_batches: int = 1,
) -> Learner:
    """Supervised fine-tuning on a task's demonstrations (Ouyang et al. 2022, section 3.5, step 1).

        loss = -1/N Σ_t log π(y_t | x, y_<t)  over the N completion tokens of the batch

    The end of a completion is one of them, prompt and padding are not; which tokens are padding is told by where they
    stand, since in some vocabularies the end and the padding are one token.

    Args:
        task: where problems and their demonstrations come from.
        policy: what learns.
        batch_size: demonstrations per step, over all devices.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which the step size falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: sum the gradient over so many parts of the batch, one at a time; the result is the same.

    Raises:
        UserError: a batch that cannot be cut into equal parts.
    """

    def example(key: Key) -> tuple[Prompt, Array]:
        draw_key, demonstration_key = jax.random.split(key)
        problem = task.draw(draw_key)
        return task.prompt_of(problem), task.demonstration(problem, demonstration_key)

    def draw(keys: Array) -> Rollout:
        return completion_rollout(*jax.vmap(example)(keys), end=task.vocabulary.end)

    def loss(params: Params, _: Tree, examples: SupervisedBatch) -> tuple[Array, Metrics]:
        distribution = policy.evaluate(params.policy, examples.rollout)
        log_prob, entropy = distribution.log_prob_and_entropy(examples.rollout.steps.action)
        total = -_weighted(examples.weight, log_prob)
        return total, {"loss": total, "entropy": _weighted(examples.weight, entropy)}

    return supervised(
        lambda key: Params(policy.init(key), ()),
        draw,
        loss,
        lambda params: make_actor(policy, params.policy),
        batch_size=batch_size,
        learning_rate=learning_rate,
        anneal_steps=anneal_steps,
        max_grad_norm=max_grad_norm,
        micro_batches=micro_batches,
    )


def _weighted(weight: Array, x: Array) -> Array:
    """Σ weight x; what stands where the weight is 0 is not read."""
    return (weight * jnp.where(weight > 0, x, 0.0)).sum()

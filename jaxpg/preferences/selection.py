"""Choosing among completions of one prompt by a reward model: the best of n, and a majority weighted by scores."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpg.envs.text import Task, TextState, best_of_n, weighted_vote
from jaxpg.models.generation import one_completion
from jaxpg.models.language_model import RewardModel
from jaxpg.parallel import collectives
from jaxpg.types import Array, Env, Metrics, Outcome, Rollout, Tree

LogWeight = Callable[[Task, RewardModel, Tree, Rollout], Array]
"""task, model, its parameters, completions -> the logarithm of the weight of each, [B] float32."""


def by_outcome(task: Task, model: RewardModel, params: Tree, rollout: Rollout) -> Array:
    """log σ(score), for a model that scores whole completions."""
    return jax.nn.log_sigmoid(model.score(params, rollout))


def by_process(task: Task, model: RewardModel, params: Tree, rollout: Rollout) -> Array:
    """Σ_j log σ(s_j): how probable it is that every step is right (Lightman et al. 2023, section 2.6).

    Raises:
        UserError: the completions of the task have no steps.
    """
    task.check_steps_exist()
    assert task.step_ends
    steps = rollout.steps
    ends = jax.vmap(task.step_ends)(steps.action.T, steps.mask.sum(0).astype(jnp.int32)).T
    return jnp.where(ends, jax.nn.log_sigmoid(model.token_scores(params, rollout)), 0.0).sum(0)


def selecting_env(env: Env, task: Task, model: RewardModel, params: Tree, log_weight: LogWeight) -> Env:
    """The environment of a text task, which also measures how well a reward model selects.

    Further metrics are "model_score", the mean logarithm of the weights, and, for groups of n completions of one
    prompt, "best@n", the accuracy of the one with the largest weight (`best_of_n`), and "weighted@n", that of the
    answer with the largest sum of weights (`weighted_vote`). Rewards stay as they are.

    Args:
        env: of the task.
        task: the task.
        model: the reward model.
        params: its parameters.
        log_weight: how it weighs completions.
    """
    assert env.context
    assert env.outcome
    assert env.measure
    prompt_of, outcome_of, measure = env.context, env.outcome, env.measure

    def outcome(state: TextState) -> Outcome:
        rollout = one_completion(prompt_of(state), state.tokens, end=task.vocabulary.end)
        result = outcome_of(state)
        return result._replace(parts=result.parts | {"model_score": log_weight(task, model, params, rollout)[0]})

    def measured(outcome: Outcome, length: Array, group_size: int) -> Metrics:
        metrics = measure(outcome, length, group_size)
        return metrics | _selected(outcome, group_size) if group_size > 1 else metrics

    return env._replace(outcome=outcome, measure=measured)


def _selected(outcome: Outcome, group_size: int) -> Metrics:
    assert not isinstance(outcome.answer, tuple)  # text tasks always have one
    right = (outcome.parts["accuracy"] >= 1).astype(jnp.float32)
    groups = (x.reshape(-1, group_size) for x in (outcome.answer, right, outcome.parts["model_score"]))
    answer, right, score = groups
    weight = jnp.exp(score - score.max(-1, keepdims=True))
    return {
        f"best@{group_size}": collectives.mean(best_of_n(score, right)),
        f"weighted@{group_size}": collectives.mean(weighted_vote(answer, right, weight)),
    }

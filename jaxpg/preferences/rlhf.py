"""Reinforcement learning from reward models: a score as a reward, by itself or together with the rules of the task."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.envs.text import GradedCompletion, Reward, RewardFunction, Task
from jaxpg.envs.text.text_env import TextState, text_env
from jaxpg.models.generation import one_completion
from jaxpg.models.language_model import RewardModel
from jaxpg.types import Array, Env, Outcome, Tree

SCORE = "score"
"""The name of the only reward in `rlhf_env`."""


def score_of(model: RewardModel, model_params: Tree) -> RewardFunction:
    """The score of a reward model as a reward function, for an entry of a task's list of rewards.

    Args:
        model: the reward model.
        model_params: its parameters, such as `state.params.critic` of `reward_model`; they are not trained.
    """

    def score(graded: GradedCompletion) -> Array:
        rollout = one_completion(graded.prompt, graded.tokens, end=graded.vocabulary.end)
        value: Array = model.score(model_params, rollout)[0]
        return value

    return score


def rlhf_env(task: Task, model: RewardModel, model_params: Tree) -> Env:
    """The environment of a text task whose only reward is the score of a reward model.

    With a policy-gradient algorithm and a KL penalty to the initial policy in the reward, this is RLHF (Ouyang et al.
    2022, section 3.5, step 3). The score is logged as "return" and as "reward_score". The task's own verdict is only
    logged, as is its "true_reward" where it has one. A return that grows while the true reward falls means that the
    reward model is being exploited (Gao et al. 2023, "Scaling Laws for Reward Model Overoptimization").

    Args:
        task: the source of prompts.
        model: the reward model.
        model_params: its parameters, such as `state.params.critic` of `reward_model`; they are not trained.
    """
    return with_true_reward(text_env(task, rewards={SCORE: Reward(score_of(model, model_params))}), task)


def with_true_reward(env: Env, task: Task) -> Env:
    """The environment of a task, which also logs the task's "true_reward", where it has one: learned rewards miss it.

    Args:
        env: `text_env` of the task.
        task: the task.
    """
    true_reward = task.true_reward
    if true_reward is None:
        return env
    assert env.outcome is not None
    plain_outcome = env.outcome

    def outcome(state: TextState) -> Outcome:
        plain = plain_outcome(state)
        true = true_reward(state.problem, state.tokens, state.length)
        return plain._replace(parts=plain.parts | {"true_reward": jnp.asarray(true, jnp.float32)})

    return env._replace(outcome=outcome)

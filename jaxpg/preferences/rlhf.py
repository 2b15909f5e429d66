"""Reinforcement learning from a reward model: its score takes the place of the verifier's reward."""

from __future__ import annotations

import jax

from jaxpg.envs.text import Task
from jaxpg.envs.text.text_env import TextState, text_env
from jaxpg.models.generation import completion_rollout
from jaxpg.models.language_model import RewardModel
from jaxpg.types import Env, Outcome, Tree

LOGGED_PARTS = ("accuracy", "format", "truncated")
"""Parts of the plain text environment's outcome that are logged here but not rewarded."""


def rlhf_env(task: Task, model: RewardModel, model_params: Tree) -> Env:
    """The environment of a text task whose reward is the score of a reward model.

    With a policy-gradient algorithm and a KL penalty to the initial policy in the reward, this is RLHF (Ouyang et al.
    2022, section 3.5, step 3). The score is logged as "return". The task's own verdict is only logged, as is its
    "true_reward" where it has one. A return that grows while the true reward falls means that the reward model is being
    exploited (Gao et al. 2023, "Scaling Laws for Reward Model Overoptimization").

    Args:
        task: the source of prompts.
        model: the reward model.
        model_params: its parameters, such as `state.params.critic` of `reward_model`; they are not trained.
    """
    env = text_env(task)
    assert env.context is not None
    assert env.outcome is not None
    prompt_of, verified_outcome = env.context, env.outcome

    def outcome(state: TextState) -> Outcome:
        prompt, tokens = jax.tree.map(lambda x: x[None], (prompt_of(state), state.tokens))
        score = model.score(model_params, completion_rollout(prompt, tokens, end=task.vocabulary.end))[0]
        verified = verified_outcome(state)
        parts = {name: verified.parts[name] for name in LOGGED_PARTS}
        if task.true_reward:
            parts["true_reward"] = task.true_reward(state.problem, state.tokens, state.length)
        return Outcome(score, parts, verified.answer)

    return env._replace(outcome=outcome)

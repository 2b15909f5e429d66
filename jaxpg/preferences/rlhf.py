"""Reinforcement learning from a reward model: its score takes the place of the verdict."""

from __future__ import annotations

import jax

from jaxpg.envs.text import Task
from jaxpg.envs.text.text_env import TextState, text_env
from jaxpg.models.generation import completion_rollout
from jaxpg.models.language_model import RewardModel
from jaxpg.types import Env, Outcome, Tree

OF_THE_VERDICT = ("accuracy", "format", "truncated")


def rlhf_env(task: Task, scorer: RewardModel, scorer_params: Tree) -> Env:
    """The environment of a text task in which a completion is worth what a reward model says.

    With a policy-gradient algorithm and a KL to the policy that it begins with, in the reward, this is RLHF (Ouyang et
    al. 2022, section 3.5, step 3). What is paid is logged as "return"; what the task makes of a completion is only
    logged, and so is its "true_reward" where the task knows one. Where the return grows and the true reward falls, the
    reward model is being exploited (Gao et al. 2023, "Scaling Laws for Reward Model Overoptimization").

    Args:
        task: what is asked.
        scorer: the reward model.
        scorer_params: its parameters, such as `state.params.critic` of `reward_model`; they stay as they are.
    """
    env = text_env(task)
    assert env.context is not None
    assert env.outcome is not None
    show, judge = env.context, env.outcome

    def outcome(state: TextState) -> Outcome:
        prompt, tokens = jax.tree.map(lambda x: x[None], (show(state), state.tokens))
        score = scorer.score(scorer_params, completion_rollout(prompt, tokens, end=task.vocabulary.end))[0]
        judged = judge(state)
        parts = {name: judged.parts[name] for name in OF_THE_VERDICT}
        if task.true_reward:
            parts["true_reward"] = task.true_reward(state.problem, state.tokens, state.length)
        return Outcome(score, parts, judged.answer)

    return env._replace(outcome=outcome)

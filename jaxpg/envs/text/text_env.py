"""A text task as an environment: an episode is a completion, an action is a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.text.metrics import completion_metrics
from jaxpg.envs.text.rewards import ACCURACY, Entry, grade, make_rewards, reward_terms
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.types import Array, Discrete, Env, Key, Outcome, TimeStep, Tree


class TextState(NamedTuple):
    """State of a text environment.

    problem: the problem, as the task drew it.
    tokens: [T] int32, the completion so far, padded after it.
    length: [] int32, the number of tokens written so far.
    """

    problem: Tree
    tokens: Array
    length: Array


def text_env(task: Task, *, rewards: Mapping[str, Entry] = ACCURACY, overlong_cache: int = 0) -> Env:
    """The environment of a text task.

    Observations are the token before each action: the last one of the prompt, then those of the completion. The context
    is a Prompt. An episode ends with the end token (a termination) or after `task.max_tokens` tokens (a time-out).
    Rewards of the steps are 0. The reward of the outcome is Σ weight · value over the list of rewards. Its parts are
    the values ("reward_accuracy" and so on), of several rewards also weight · value ("weighed_accuracy" and so on),
    "accuracy" (pass@1), "format", "truncated" (1 where the completion has no end token) and, for tasks with a
    scratchpad, "scratchpad_used". Where values are to be standardised, that is left to the learner, which sees all
    episodes of a rollout (`Env.reward_terms`): the reward of the outcome, which is logged as the return and by which
    checkpoints are ranked, is that of the plain values.

    Args:
        task: the task.
        rewards: the list of rewards by name: weights, tables of settings, or `Reward` (rewards.py).
        overlong_cache: the number of tokens before the maximum over which the overlong reward falls to -1.

    Raises:
        UserError: unknown rewards, weights that are not finite, or an overlong_cache without the reward overlong.
    """
    made = make_rewards(task, rewards, overlong_cache)
    terms, vocabulary = reward_terms(made), task.vocabulary

    def reset(key: Key) -> tuple[TextState, Array]:
        problem = task.draw(key)
        prompt = task.prompt(problem)
        state = TextState(problem, jnp.full(task.max_tokens, PAD, jnp.int32), jnp.zeros((), jnp.int32))
        return state, prompt.tokens[prompt.mask.sum() - 1]

    def step(key: Key, state: TextState, action: Array) -> tuple[TextState, TimeStep]:
        token = action.astype(jnp.int32)
        tokens, length = state.tokens.at[state.length].set(token), state.length + 1
        ended = token == vocabulary.end
        return TextState(state.problem, tokens, length), TimeStep(
            obs=token,
            reward=jnp.zeros((), jnp.float32),
            discount=1.0 - ended.astype(jnp.float32),
            last=ended | (length >= task.max_tokens),
        )

    def outcome(state: TextState) -> Outcome:
        graded = grade(task, state.problem, state.tokens, state.length, overlong_cache)
        verdict = graded.verdict
        values = {name: reward.function(graded).astype(jnp.float32) for name, reward in made.items()}
        weighed = {name: reward.weight * values[name] for name, reward in made.items()}
        total = sum(weighed.values(), jnp.zeros((), jnp.float32))
        truncated = state.tokens[state.length - 1] != vocabulary.end
        parts = {f"reward_{name}": value for name, value in values.items()}
        if len(weighed) > 1 and not terms:
            parts |= {f"weighed_{name}": value for name, value in weighed.items()}
        parts |= {"accuracy": verdict.accuracy, "format": verdict.format, "truncated": truncated.astype(jnp.float32)}
        if not isinstance(verdict.scratchpad_used, tuple):
            parts["scratchpad_used"] = verdict.scratchpad_used
        return Outcome(total, parts, verdict.answer)

    space = Discrete(vocabulary.size)
    return Env(
        name=task.name,
        reset=reset,
        step=step,
        observation_space=space,
        action_space=space,
        time_limit=task.max_tokens,
        context=lambda state: task.prompt(state.problem),
        outcome=outcome,
        measure=completion_metrics,
        reward_terms=terms,
    )

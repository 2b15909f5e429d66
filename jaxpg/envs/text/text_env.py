"""A text task as an environment: an episode is a completion, an action is a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.text.metrics import completion_metrics
from jaxpg.envs.text.rewards import ACCURACY, REWARDS, GradedCompletion, check_rewards
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.types import Array, Discrete, Env, Key, Outcome, TimeStep, Tree


class TextState(NamedTuple):
    """State of a text environment.

    problem: what the prompt asks, as the task drew it.
    tokens: [T] int32, the completion so far, padded behind it.
    length: [] int32, how many tokens it has.
    """

    problem: Tree
    tokens: Array
    length: Array


def text_env(task: Task, *, rewards: Mapping[str, Array | float] = ACCURACY, overlong_cache: int = 0) -> Env:
    """The environment of a text task.

    Observations are the tokens before each action: the last one of the prompt, then those written. The context is a
    Prompt. A completion ends with its end token (a termination) or when `task.max_tokens` are written (a time-out).
    Steps pay nothing; the outcome is the sum of weight times reward function, which the parts list one by one, without
    their weights, as "reward_accuracy" and so on, beside "accuracy" (pass@1), "format", "truncated", which is 1 where
    the tokens ran out, and, where there is a scratchpad, "scratchpad_used", which is 1 where it was used.

    Args:
        task: what is asked.
        rewards: the weights of reward functions by name: accuracy, format, length, overlong.
        overlong_cache: how many tokens before the maximum the overlong reward begins to fall.

    Raises:
        UserError: rewards that do not exist or have no finite weight, or an overlong_cache without a use.
    """
    check_rewards(task, rewards, overlong_cache)
    vocabulary = task.vocabulary

    def reset(key: Key) -> tuple[TextState, Array]:
        problem = task.draw(key)
        prompt = task.prompt_of(problem)
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
        verdict = task.verify(state.problem, state.tokens, state.length)
        judged = GradedCompletion(verdict, state.length, task.max_tokens, overlong_cache)
        paid = {name: REWARDS[name](judged).astype(jnp.float32) for name in rewards}
        total = sum((weight * paid[name] for name, weight in rewards.items()), jnp.zeros((), jnp.float32))
        cut_off = state.tokens[state.length - 1] != vocabulary.end
        parts = {f"reward_{name}": value for name, value in paid.items()}
        parts |= {"accuracy": verdict.accuracy, "format": verdict.format, "truncated": cut_off.astype(jnp.float32)}
        parts |= {"scratchpad_used": verdict.scratchpad_used} if not isinstance(verdict.scratchpad_used, tuple) else {}
        return Outcome(total, parts, verdict.answer)

    space = Discrete(vocabulary.size)
    return Env(
        name=task.name,
        reset=reset,
        step=step,
        observation_space=space,
        action_space=space,
        time_limit=task.max_tokens,
        context=lambda state: task.prompt_of(state.problem),
        outcome=outcome,
        measure=completion_metrics,
    )

"""A text task as an environment: an episode is a completion, an action is a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.text.measures import measure
from jaxpg.envs.text.task import Task, Verdict
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.errors import UserError
from jaxpg.options import refuse_unknown
from jaxpg.penalties import overlong_penalty
from jaxpg.types import Array, Discrete, Env, Key, Outcome, TimeStep, Tree

ACCURACY = {"accuracy": 1.0}
"""The reward of an answer: 1 for a right one, else 0."""


class Writing(NamedTuple):
    """State of a text environment.

    problem: what the prompt asks, as the task drew it.
    tokens: [T] int32, the completion so far, padded behind it.
    length: [] int32, how many tokens it has.
    """

    problem: Tree
    tokens: Array
    length: Array


class Judged(NamedTuple):
    """A completion that is over, as reward functions see it: `length` [] int32 of `max_tokens` tokens."""

    verdict: Verdict
    length: Array
    max_tokens: int
    overlong_cache: int


REWARDS: dict[str, Callable[[Judged], Array]] = {
    "accuracy": lambda judged: judged.verdict.accuracy,
    "format": lambda judged: judged.verdict.format,
    "length": lambda judged: -judged.length / judged.max_tokens,
    "overlong": lambda judged: overlong_penalty(judged.length, judged.max_tokens, judged.overlong_cache),
}
"""Reward functions by name: right, of the form asked for, a price per token (-1 for all of them), and the soft
punishment of completions that come near the maximum (Yu et al. 2025 (DAPO), equation 13)."""


def text_env(task: Task, *, rewards: Mapping[str, Array | float] = ACCURACY, overlong_cache: int = 0) -> Env:
    """The environment of a text task.

    Observations are the tokens before each action: the last one of the prompt, then those written. The context is a
    Prompt. A completion ends with its end token (a termination) or when `task.max_tokens` are written (a time-out).
    Steps pay nothing; the outcome is the sum of weight times reward function, which the parts list one by one, without
    their weights, as "reward_accuracy" and so on, beside "accuracy" (pass@1), "format", "cut_off", which is 1 where
    the tokens ran out, and, where there is a scratchpad, "thinks", which is 1 where it was used.

    Args:
        task: what is asked.
        rewards: the weights of reward functions by name: accuracy, format, length, overlong.
        overlong_cache: how many tokens before the maximum the overlong reward begins to fall.

    Raises:
        UserError: rewards that do not exist or have no finite weight, or an overlong_cache without a use.
    """
    _check_rewards(task, rewards, overlong_cache)
    vocabulary = task.vocabulary

    def reset(key: Key) -> tuple[Writing, Array]:
        problem = task.draw(key)
        prompt = task.shown(problem)
        state = Writing(problem, jnp.full(task.max_tokens, PAD, jnp.int32), jnp.zeros((), jnp.int32))
        return state, prompt.tokens[prompt.mask.sum() - 1]

    def step(key: Key, state: Writing, action: Array) -> tuple[Writing, TimeStep]:
        token = action.astype(jnp.int32)
        tokens, length = state.tokens.at[state.length].set(token), state.length + 1
        ended = token == vocabulary.end
        return Writing(state.problem, tokens, length), TimeStep(
            obs=token,
            reward=jnp.zeros((), jnp.float32),
            discount=1.0 - ended.astype(jnp.float32),
            last=ended | (length >= task.max_tokens),
        )

    def outcome(state: Writing) -> Outcome:
        verdict = task.verify(state.problem, state.tokens, state.length)
        judged = Judged(verdict, state.length, task.max_tokens, overlong_cache)
        paid = {name: REWARDS[name](judged).astype(jnp.float32) for name in rewards}
        total = sum((weight * paid[name] for name, weight in rewards.items()), jnp.zeros((), jnp.float32))
        cut_off = state.tokens[state.length - 1] != vocabulary.end
        parts = {f"reward_{name}": value for name, value in paid.items()}
        parts |= {"accuracy": verdict.accuracy, "format": verdict.format, "cut_off": cut_off.astype(jnp.float32)}
        parts |= {"thinks": verdict.thinks} if not isinstance(verdict.thinks, tuple) else {}
        return Outcome(total, parts, verdict.answer)

    space = Discrete(vocabulary.size)
    return Env(
        name=task.name,
        reset=reset,
        step=step,
        observation_space=space,
        action_space=space,
        time_limit=task.max_tokens,
        context=lambda state: task.shown(state.problem),
        outcome=outcome,
        measure=measure,
    )


def _check_rewards(task: Task, rewards: Mapping[str, Array | float], overlong_cache: int) -> None:
    if not rewards:
        raise UserError(f"{task.name} needs a reward. There are: {', '.join(REWARDS)}.")
    for name, weight in rewards.items():
        if name not in REWARDS:
            refuse_unknown("reward", name, REWARDS, f" of {task.name}")
        if isinstance(weight, Array):  # one per run, perhaps: who writes that knows what it is
            continue
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"{task.name}: the weight of the reward {name} must be a finite number, not {weight!r}.")
    if "overlong" in rewards and not 1 <= overlong_cache <= task.max_tokens:
        raise UserError(
            f"{task.name}: the overlong reward falls over the last overlong_cache tokens, from 1 to all "
            f"{task.max_tokens}, not {overlong_cache!r}."
        )
    if "overlong" not in rewards and overlong_cache:
        raise UserError(f"{task.name}: overlong_cache = {overlong_cache!r} is of use only with the reward overlong.")

"""A text task as an environment: an episode is a completion, an action is a token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.text.metrics import completion_metrics
from jaxpg.envs.text.rewards import ACCURACY, Entry, check_weight, grade, make_rewards, reward_terms
from jaxpg.envs.text.task import Task
from jaxpg.envs.text.vocabulary import PAD
from jaxpg.errors import UserError, check_record
from jaxpg.types import Array, Discrete, Env, Key, Outcome, StepRewards, TimeStep, Tree
from jaxpg.vectorize import set_slot

PROCESS = "process"
"""The name under which the rewards of steps are logged, beside those of the list."""


class TextState(NamedTuple):
    """State of a text environment.

    problem: the problem, as the task drew it.
    tokens: [T] int32, the completion so far, padded after it.
    length: [] int32, the number of tokens written so far.
    """

    problem: Tree
    tokens: Array
    length: Array


def text_env(
    task: Task,
    *,
    rewards: Mapping[str, Entry] = ACCURACY,
    overlong_cache: int = 0,
    process_weight: Array | float = 0.0,
) -> Env:
    """The environment of a text task.

    Observations are the token before each action: the last one of the prompt, then those of the completion. The context
    is a Prompt. An episode ends with the end token (a termination) or after `task.max_tokens` tokens (a time-out).
    Rewards of the tokens are 0. The reward of the outcome is Σ weight · value over the list of rewards. Its parts are
    the values ("reward_accuracy" and so on), of several rewards also weight · value ("weighted_accuracy" and so on),
    "accuracy" (what the task's check returned), "format", "truncated" (1 where the completion has no end token) and,
    for tasks with a scratchpad, "scratchpad_used". Where values are to be standardised, that is left to the learner,
    which sees all episodes of a rollout (`Env.reward_terms`): the reward of the outcome, which is logged as the return
    and by which checkpoints are ranked, is that of the plain values.

    With a process_weight every step of the scratchpad is rewarded too, where it ends, by process_weight times what
    `task.check_steps` says of it (process supervision, Lightman et al. 2023); the answer is the last step, and the
    outcome its reward, standardised or not. Further parts are then "reward_process", the mean over those steps (0 if
    there are none), and "reasoning_steps", their number.

    Args:
        task: the task.
        rewards: the list of rewards by name: weights, tables of settings, or `Reward` (rewards.py).
        overlong_cache: the number of tokens before the maximum over which the overlong reward falls to -1.
        process_weight: reward of a right step of the scratchpad; 0 rewards whole completions alone.

    Raises:
        UserError: unknown rewards, weights that are not finite, an overlong_cache without the reward overlong, or a
            process_weight where the task cannot check steps or the list has a reward of the name "process"; or `task`
            is no Task.
    """
    check_record("text_env", task, Task, 'envs.text.TASKS["sort"]()')
    made = make_rewards(task, rewards, overlong_cache)
    by_process = _is_by_process(task, process_weight, made)
    terms, vocabulary = reward_terms(made), task.vocabulary

    def reset(key: Key) -> tuple[TextState, Array]:
        problem = task.draw(key)
        prompt = task.prompt(problem)
        state = TextState(problem, jnp.full(task.max_tokens, PAD, jnp.int32), jnp.zeros((), jnp.int32))
        return state, prompt.tokens[prompt.last()]

    def step(key: Key, state: TextState, action: Array) -> tuple[TextState, TimeStep]:
        token = action.astype(jnp.int32)
        tokens, length = set_slot(state.tokens, state.length, token), state.length + 1
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
        weighted = {name: reward.weight * values[name] for name, reward in made.items()}
        total = sum(weighted.values(), jnp.zeros((), jnp.float32))
        truncated = state.tokens[state.length - 1] != vocabulary.end
        parts = {f"reward_{name}": value for name, value in values.items()}
        if len(weighted) > 1 and not terms:
            parts |= {f"weighted_{name}": value for name, value in weighted.items()}
        parts |= {"accuracy": verdict.accuracy, "format": verdict.format, "truncated": truncated.astype(jnp.float32)}
        if not isinstance(verdict.scratchpad_used, tuple):
            parts["scratchpad_used"] = verdict.scratchpad_used
        if not by_process:
            return Outcome(total, parts, verdict.answer)
        judged = _judged_steps(task, state)
        number = (judged.end.sum() - 1).astype(jnp.float32)
        parts |= {f"reward_{PROCESS}": judged.reward.sum() / jnp.maximum(number, 1), "reasoning_steps": number}
        return Outcome(total, parts, verdict.answer, judged._replace(reward=process_weight * judged.reward))

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


def _is_by_process(task: Task, process_weight: Array | float, rewards: Collection[str]) -> bool:
    """Whether steps are rewarded.

    Raises:
        UserError: as `text_env`.
    """
    check_weight(task, "of a step (process_weight)", process_weight)
    if not isinstance(process_weight, Array) and process_weight == 0:
        return False
    task.check_steps_exist()
    if task.check_steps is None:
        raise UserError(
            f"{task.name} cannot check the steps of a completion itself: name a process reward model with "
            "process_reward, or set process_weight = 0."
        )
    if PROCESS in rewards:
        raise UserError(
            f"{task.name}: {PROCESS} is the name under which the rewards of steps are logged: give another one to the "
            f"reward {PROCESS} of the list."
        )
    return True


def _judged_steps(task: Task, state: TextState) -> StepRewards:
    """What `task.check_steps` says of the steps before the answer, and where steps end."""
    assert task.step_ends
    assert task.check_steps
    ends = task.step_ends(state.tokens, state.length)
    before_answer = ends & (jnp.arange(len(ends)) != state.length - 1)
    judged = task.check_steps(state.problem, state.tokens, state.length)
    return StepRewards(jnp.where(before_answer, judged, 0.0).astype(jnp.float32), ends.astype(jnp.float32))

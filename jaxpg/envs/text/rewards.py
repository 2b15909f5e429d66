"""Reward functions of text tasks by name, and the soft penalty on overlong completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.text.task import Task, Verdict
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.objectives.kl import (
    Scalar,
)
from jaxpg.types import Array


def overlong_penalty(length: Array, max_length: Scalar, cache: Scalar) -> Array:
    """0 up to max_length - cache, then linear to -1 at max_length, and -1 beyond: one number per sequence.

    `length`, `max_length` and `cache` > 0 are in tokens (steps). Source: Yu et al. 2025 (DAPO), equation 13.
    """
    return jnp.clip((max_length - cache - length) / cache, -1, 0)


ACCURACY = {"accuracy": 1.0}
"""The reward of an answer: 1 for a right one, else 0."""


class GradedCompletion(NamedTuple):
    """A completion that is over, as reward functions see it: `length` [] int32 of `max_tokens` tokens."""

    verdict: Verdict
    length: Array
    max_tokens: int
    overlong_cache: int


REWARDS: dict[str, Callable[[GradedCompletion], Array]] = {
    "accuracy": lambda judged: judged.verdict.accuracy,
    "format": lambda judged: judged.verdict.format,
    "length": lambda judged: -judged.length / judged.max_tokens,
    "overlong": lambda judged: overlong_penalty(judged.length, judged.max_tokens, judged.overlong_cache),
}
"""Reward functions by name: right, of the form asked for, a price per token (-1 for all of them), and the soft
punishment of completions that come near the maximum (Yu et al. 2025 (DAPO), equation 13)."""


def check_rewards(task: Task, rewards: Mapping[str, Array | float], overlong_cache: int) -> None:
    """Raise a UserError unless these rewards exist, have finite weights, and use the overlong_cache that is given."""
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

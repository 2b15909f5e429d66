"""Reward functions of text tasks by name, and the soft penalty on overlong completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxpg.envs.text.task import Task, Verdict
from jaxpg.errors import UserError, refuse_unknown
from jaxpg.types import Array


def overlong_penalty(length: Array, max_length: Array | float, cache: Array | float) -> Array:
    """0 up to max_length - cache, then linear to -1 at max_length, and -1 beyond: one number per sequence.

    `length`, `max_length` and `cache` are in tokens. With a cache of 0 it is 0 up to max_length and -1 beyond. Source:
    Yu et al. 2025 (DAPO), equation 13.
    """
    return jnp.clip((max_length - cache - length) / jnp.maximum(cache, 1e-6), -1, 0)


class GradedCompletion(NamedTuple):
    """A finished completion as reward functions see it: its verdict, and `length` [] int32 of `max_tokens` tokens."""

    verdict: Verdict
    length: Array
    max_tokens: int
    overlong_cache: int


REWARDS: dict[str, Callable[[GradedCompletion], Array]] = {
    "accuracy": lambda graded: graded.verdict.accuracy,
    "format": lambda graded: graded.verdict.format,
    "length": lambda graded: -graded.length / graded.max_tokens,
    "overlong": lambda graded: overlong_penalty(graded.length, graded.max_tokens, graded.overlong_cache),
}
"""Reward functions by name: a right answer, the required form, a price per token (-1 for max_tokens), and
`overlong_penalty`."""
ACCURACY = {"accuracy": 1.0}
"""The default weights: 1 for a right answer, else 0."""


def check_rewards(task: Task, rewards: Mapping[str, Array | float], overlong_cache: int) -> None:
    """Check weights of reward functions.

    Raises:
        UserError: no reward, an unknown one, a weight that is not finite, an overlong_cache that is out of range or
            that no reward uses.
    """
    if not rewards:
        raise UserError(f"{task.name} needs a reward. There are: {', '.join(REWARDS)}.")
    for name, weight in rewards.items():
        if name not in REWARDS:
            refuse_unknown("reward", name, REWARDS, f" of {task.name}")
        check_weight(task, f"of the reward {name}", weight)
    if "overlong" in rewards and not 1 <= overlong_cache <= task.max_tokens:
        raise UserError(
            f"{task.name}: the reward overlong needs an overlong_cache from 1 to max_tokens = {task.max_tokens}, "
            f"not {overlong_cache!r}."
        )
    if "overlong" not in rewards and overlong_cache:
        raise UserError(f"{task.name}: overlong_cache = {overlong_cache!r} has no effect without the reward overlong.")


def check_weight(task: Task, of: str, weight: Array | float) -> None:
    """Raise a UserError unless a weight is a finite number; a traced one is not known here."""
    if isinstance(weight, Array):
        return
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise UserError(f"{task.name}: the weight {of} must be a finite number, not {weight!r}.")

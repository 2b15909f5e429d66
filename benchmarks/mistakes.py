"""Deliberate mistakes for the negative controls of learning.py, each made by replacing one field of the record."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxpg.objectives import surrogates
from jaxpg.objectives.advantages import Credit
from jaxpg.policy_gradient import PolicyGradient
from jaxpg.types import Array, Transition


def without_clip(algorithm: PolicyGradient) -> PolicyGradient:
    """The ratio goes where it likes."""
    return algorithm._replace(surrogate=surrogates.importance_ratio)


def early_episode_ends(algorithm: PolicyGradient) -> PolicyGradient:
    """Episodes end one step before they do: the mask of the next step is read."""

    def credit(steps: Transition, *args: Array, **settings: Any) -> Credit:
        early = steps._replace(last=jnp.roll(steps.last, -1, 0), discount=jnp.roll(steps.discount, -1, 0))
        return algorithm.credit(early, *args, **settings)

    return algorithm._replace(credit=credit)


def time_outs_as_terminations(algorithm: PolicyGradient) -> PolicyGradient:
    """Nothing is expected behind the time limit."""

    def credit(steps: Transition, *args: Array, **settings: Any) -> Credit:
        return algorithm.credit(steps._replace(discount=steps.discount * ~steps.last), *args, **settings)

    return algorithm._replace(credit=credit)


def groups_shuffled(algorithm: PolicyGradient, *, group_size: int) -> PolicyGradient:
    """Every group gets the advantages of another one."""

    def credit(*args: Any, **settings: Any) -> Credit:
        right = algorithm.credit(*args, **settings)
        return right._replace(advantage=jnp.roll(right.advantage, group_size, 1))

    return algorithm._replace(credit=credit)

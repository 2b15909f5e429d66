"""Deliberate mistakes for the negative controls of learning.py, each made by replacing one field of the record."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxpg.algorithm import PolicyGradient
from jaxpg.objectives import advantages, surrogates
from jaxpg.objectives.advantages import Credit
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


def normalized_targets(algorithm: PolicyGradient) -> PolicyGradient:
    """What the critic regresses on is standardised over the batch, and psi is that less the critic's value.

    No mistake where targets are whole returns: a critic of standardised returns is a baseline as well. Where they
    bootstrap from the critic, its values and the rewards are then of different scales.
    """

    def credit(steps: Transition, v_tm1: Array, *args: Array, **settings: Any) -> Credit:
        raw = algorithm.credit(steps, v_tm1, *args, **settings)
        target = advantages.standardize(raw.target, steps.mask)
        return raw._replace(target=target, advantage=jnp.where(steps.mask, target - v_tm1, 0))

    return algorithm._replace(credit=credit)

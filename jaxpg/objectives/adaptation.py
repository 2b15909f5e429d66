"""State that belongs to an algorithm: what it adapts from iteration to iteration, such as the weight of a KL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpg.errors import UserError
from jaxpg.objectives.kl import reference_kl
from jaxpg.types import Metrics, Scalar

LEAST = 1e-6
"""The least weight of a KL that is steered."""


class Adaptation(NamedTuple):
    """How an algorithm changes itself. Its state is a dict of float32 scalars, which are metrics by their names too.

    init() -> state, before the first iteration.
    apply(algorithm, state) -> the PolicyGradient of the next iteration: `algorithm._replace(...)`. Its collector and
        optimizer have to stay.
    update(state, metrics) -> state, after an iteration. `metrics` are those of the iteration, of all devices, and
        `steps`, the environment steps so far; with a reference policy `episode_reference_kl` is among them.
    """

    init: Callable[[], Metrics]
    apply: Callable[[Any, Metrics], Any]
    update: Callable[[Metrics, Metrics], Metrics]


def adaptive_kl(placement: str, coefficient: Scalar, *, target: Scalar, gain: Scalar = 0.1) -> Adaptation:
    """The weight β of the KL to a reference policy, steered to a target by a proportional controller.

        e = clip( KL / target - 1, -0.2, 0.2 ),    β <- max( β (1 + gain e), 1e-6 )

    with KL the mean over episodes of sum_t log(π/ref). Source: Ziegler et al. 2019 ("Fine-Tuning Language Models from
    Human Preferences"), section 2.2. The floor of 1e-6 is ours: β is multiplied, so 0 would be permanent.

    Args:
        placement: of the KL, see `kl.reference_kl`.
        coefficient: β of the first iteration, above 0.
        target: nats per episode.
        gain: K_β of the paper, 0.1 there; the weight changes by at most a fifth of it in an iteration.

    Raises:
        UserError: a coefficient of 0, of which every multiple is 0.
    """
    if isinstance(coefficient, int | float) and coefficient == 0:
        raise UserError("kl_coefficient = 0 cannot be steered to reference_kl_target: begin with a weight above 0.")
    return Adaptation(
        init=partial(_initial_coefficient, coefficient=coefficient),
        apply=partial(_with_coefficient, placement=placement),
        update=partial(_steer, target=target, gain=gain),
    )


def _initial_coefficient(*, coefficient: Scalar) -> Metrics:
    return {"kl_coefficient": jnp.asarray(coefficient, jnp.float32)}


def _with_coefficient(algorithm: Any, state: Metrics, *, placement: str) -> Any:
    return algorithm._replace(reference_kl=reference_kl(placement, state["kl_coefficient"]))


def _steer(state: Metrics, metrics: Metrics, *, target: Scalar, gain: Scalar) -> Metrics:
    error = jnp.clip(metrics["episode_reference_kl"] / target - 1, -0.2, 0.2)
    return {"kl_coefficient": jnp.maximum(state["kl_coefficient"] * (1 + gain * error), LEAST)}

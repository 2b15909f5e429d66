"""Diagnostics: the explained variance of a critic, and statistics of the advantages before they are normalised."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.objectives.moments import SampleMoments, sample_moments
from jaxpg.parallel import collectives
from jaxpg.types import Array, Metrics

LEAST_EXPLAINED = -1e6
"""The least that is reported: of targets that differ by little more than rounding the ratio means nothing."""


def explained_variance(value: Array, target: Array, mask: Array) -> Array:
    """1 - Var[target - value] / Var[target] over the steps of `mask` on all devices; 0 for a constant target.

    All `[T, B]`. 1 for a critic that predicts every target, 0 or less for one that is no better than a constant, and at
    least LEAST_EXPLAINED.
    """
    spread, unexplained = _variances(sample_moments((target, target - value), mask, exact_for_equal=True))
    explained = 1 - unexplained / jnp.where(spread > 0, spread, 1.0)
    return jnp.where(spread > 0, jnp.maximum(explained, LEAST_EXPLAINED), 0.0)


LARGEST_VARIATION = 1e6
"""The most that is reported: standardised returns have a mean of 0, and the metric must be finite."""


def credit_metrics(advantage: Array, target: Array, mask: Array) -> Metrics:
    """What a batch credits its actions with, over the steps of `mask` on all devices; all `[T, B]`.

    advantage_mean, advantage_std, advantage_min, advantage_max: of the advantages before they are normalised.
    advantage_positive: share of them above 0; half where the baseline is the median of what follows.
    return_variation: std / |mean| of the returns or targets that they are made of, the coefficient of variation; at
        most LARGEST_VARIATION, where their mean is nearly 0, and 0 where all of them are 0.
    """
    found = sample_moments((advantage, target, (advantage > 0).astype(advantage.dtype)), mask)
    (mean, target_mean, positive), (variance, target_variance, _) = found.mean, _variances(found)
    real = mask > 0
    highest, lowest = collectives.maximum([jnp.where(real, x, -jnp.inf) for x in (advantage, -advantage)])
    any_real = highest > -jnp.inf
    spread = jnp.sqrt(target_variance)
    least = jnp.maximum(spread / LARGEST_VARIATION, jnp.finfo(target.dtype).tiny)
    return {
        "advantage_mean": mean,
        "advantage_std": jnp.sqrt(variance),
        "advantage_min": jnp.where(any_real, -lowest, 0.0),
        "advantage_max": jnp.where(any_real, highest, 0.0),
        "advantage_positive": positive,
        "return_variation": jnp.where(spread > 0, spread / jnp.maximum(jnp.abs(target_mean), least), 0.0),
    }


def _variances(found: SampleMoments) -> list[Array]:
    """squares / samples of each array, 0 without a step."""
    return [x / jnp.maximum(found.samples, 1) for x in found.squares]

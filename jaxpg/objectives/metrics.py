"""How well a critic predicts."""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.types import Array


def explained_variance(value: Array, target: Array, mask: Array) -> Array:
    """1 - Var[target - value] / Var[target] over the steps of `mask` on all devices; 0 for a constant target.

    All `[T, B]`. 1 for a critic that predicts every target, 0 or less for one that is no better than a constant.
    """
    count = jnp.maximum(collectives.psum(mask.sum()), 1)

    def variance(x: Array) -> Array:
        mean = collectives.psum((mask * x).sum()) / count
        return collectives.psum((mask * (x - mean) ** 2).sum()) / count

    spread = variance(target)
    return jnp.where(spread > 0, 1 - variance(target - value) / jnp.where(spread > 0, spread, 1.0), 0.0)

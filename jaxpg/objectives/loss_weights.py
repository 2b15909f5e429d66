"""The weight of each step, `[T, B]`: a loss is always Σ weight · loss, summed over all devices.

`mask` `[T, B]` is the loss mask, 1 on the steps that train, else 0. Masked steps have weight 0; if all are masked, all
weights are 0. Counts are over all devices; each device holds the weights of its own columns.

`per_episode` and `per_episode_over` assume one episode per column. For continuing rollouts, whose columns hold parts of
several episodes, use `per_step`.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.types import Array, Scalar


def per_step(mask: Array) -> Array:
    """1/N with N the number of unmasked steps: the mean over all steps, so longer episodes count for more.

    Source: Yu et al. 2025 (DAPO), section 3.3; also the mean of PPO.
    """
    return mask / jnp.maximum(collectives.psum(mask.sum()), 1)


def per_episode(mask: Array) -> Array:
    """1/(B |o_i|): the mean over the |o_i| unmasked steps of an episode, then over the B episodes that have any.

    Source: Shao et al. 2024 (GRPO), equation 3.
    """
    return per_episode_over(mask, jnp.maximum(mask.sum(0, keepdims=True), 1))


def per_episode_over(mask: Array, length: Scalar) -> Array:
    """1/(B L): the sum over an episode divided by the constant L = `length`, in steps, then the mean over episodes.

    L is the configured maximum length, never the width of the padded batch. With it, a long bad episode is not blamed
    less per step than a short one. Columns without an unmasked step are not counted in B.
    Source: Liu et al. 2025 (Dr. GRPO), section 3.
    """
    return mask / (length * jnp.maximum(collectives.psum(mask.max(0).sum()), 1))

"""Running moments of observations and rewards, over all environments and all devices, and normalisation by them.

They belong to the learner, since an environment sees only itself. Moments are updated once per rollout, after it: the
policy then acts and learns on the same numbers within an iteration, and the probability ratio of the first update is
exactly one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpg.parallel import collectives
from jaxpg.types import Array


class Moments(NamedTuple):
    """Number of samples so far `[]`, their mean and their (biased) variance `[...]`."""

    samples: Array
    mean: Array
    variance: Array


def initial_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Moments before any sample: mean 0 and variance 1, which normalise nothing."""
    return Moments(jnp.zeros((), jnp.float32), jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))


def update_moments(moments: Moments, x: Array, mask: Array) -> Moments:
    """Moments of all samples so far and those of `x` `[T, B, ...]` where `mask` `[T, B]` is 1, over all devices.

    Two sets of n and m samples combine to mean + d m/(n+m) and, for the sums of squares, M_n + M_m + d^2 nm/(n+m),
    with d the difference of their means (Chan, Golub and LeVeque 1979, equation 2.1).
    """
    weight = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
    new = collectives.psum(mask.sum())
    mean = collectives.psum((weight * x).sum((0, 1))) / jnp.maximum(new, 1)
    squares = collectives.psum((weight * (x - mean[None, None]) ** 2).sum((0, 1)))
    count = moments.samples + new
    delta = mean - moments.mean
    fraction = new / jnp.maximum(count, 1)
    return Moments(
        samples=count,
        mean=moments.mean + delta * fraction,
        variance=jnp.where(
            count > 0,
            moments.variance * (1 - fraction) + squares / jnp.maximum(count, 1) + delta**2 * fraction * (1 - fraction),
            moments.variance,
        ),
    )


def normalize_obs(moments: Moments, x: Array, *, limit: float = 10.0, eps: float = 1e-8) -> Array:
    """(x - mean) / std, clipped to +-`limit` (Huang et al. 2022, details 5 and 6 of the continuous-control part)."""
    lead = (1,) * (x.ndim - moments.mean.ndim)
    mean, variance = (m.reshape(*lead, *m.shape) for m in (moments.mean, moments.variance))
    return jnp.clip((x - mean) * lax.rsqrt(variance + eps), -limit, limit)


def scale_rewards(moments: Moments, reward: Array, *, limit: float = 10.0, eps: float = 1e-8) -> Array:
    """reward / std, clipped to +-`limit`; not centred, which would change the task (details 7 and 8, ibid.)."""
    return jnp.clip(reward * lax.rsqrt(moments.variance + eps), -limit, limit)


def discounted_reward_sums(start: Array, reward: Array, last: Array, gamma: Array | float) -> tuple[Array, Array]:
    """Discounted sums of past rewards, R_t = gamma R_{t-1} + r_t, from 0 again after the end of an episode.

    `start` `[B]` is R before the first step, `reward` and `last` are `[T, B]`. Returns the `start` of the next segment
    and all R_t `[T, B]`. Their standard deviation is the scale of the rewards (detail 7, ibid.).
    """

    def step(before: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        reward_t, last_t = inputs
        total = gamma * before + reward_t
        return jnp.where(last_t, 0.0, total), total

    return lax.scan(step, start, (reward, last))

"""Losses per step, to be minimised: arrays of steps in, one loss per step out; weights and sums come afterwards.

The arrays are `[T, B]`, or `[1, R]` in a minibatch of R single steps, which have no order in time.

A loss of the policy is `(log_prob, old_log_prob, advantage, **settings)`: `log_prob` is differentiated, `old_log_prob`
is that of the policy that acted, and the advantage A is a constant. A loss of the critic is `(value, old_value, target,
**settings)`: `value` is differentiated, `old_value` was estimated before the update, and the target is a constant.
Settings may be traced. Advantages and targets are constants to the gradient, so meta-gradients with respect to gamma or
lambda, which act through them alone, are 0. `PerEpisode` makes a loss of whole episodes out of one of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.types import Array, Scalar


def untied_minimum(x: Array, limit: Scalar) -> Array:
    """min(x, limit); x and its slope where both are equal.

    Replaces `jnp.minimum` (and with `untied_maximum` `jnp.clip`), which gives each side half of the slope at a tie. In
    min(ρA, clip(ρ) A) every step inside the clip is a tie. On a CPU the handling of ties takes five more operations per
    minibatch, which XLA does not fuse (benchmarks/LOG.md, "four environments, without waking a thread"). And a ratio of
    exactly 1 under a clip of 0 would lose half of its slope.
    """
    return jnp.where(x > limit, limit, x)


def untied_maximum(x: Array, limit: Array, where: Array) -> Array:
    """max(x, limit), at the steps of `where` only; x and its slope where both are equal. See `untied_minimum`."""
    return jnp.where(where & (limit > x), limit, x)


def likelihood_ratio(log_prob: Array, old_log_prob: Array) -> Array:
    """ρ = π(a|s)/π_old(a|s), at most the square root of the largest float: see `capped_log_ratio`."""
    return jnp.exp(capped_log_ratio(log_prob, old_log_prob))


def capped_log_ratio(log_prob: Array, old_log_prob: Array) -> Array:
    """log π(a|s) - log π_old(a|s), at most half the logarithm of the largest float.

    An infinite ratio would turn the gradient into NaN even where the clip leaves none: 0·∞.
    """
    highest = (0.5 * jnp.log(jnp.finfo(log_prob.dtype).max)).astype(log_prob.dtype)
    return untied_minimum(log_prob - old_log_prob, highest)


def score_function(log_prob: Array, old_log_prob: Array, advantage: Array) -> Array:
    """-log π(a|s) A, whose gradient is the policy gradient of samples from π itself; `old_log_prob` is not read.

    Source: Williams 1992 (REINFORCE), section 4.
    """
    return -log_prob * lax.stop_gradient(advantage)


def importance_ratio(log_prob: Array, old_log_prob: Array, advantage: Array) -> Array:
    """-ρA with ρ = π/π_old, for samples from π_old; at π = π_old its gradient is that of `score_function`.

    Source: Schulman et al. 2015 (TRPO), equation 14.
    """
    return -likelihood_ratio(log_prob, old_log_prob) * lax.stop_gradient(advantage)


def clipped_ratio(
    log_prob: Array,
    old_log_prob: Array,
    advantage: Array,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    dual_clip: Scalar | None = None,
) -> Array:
    """-min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high) A): no gain from moving ρ beyond the clip.

    For A > 0 that is -A min(ρ, 1 + clip_high), for A < 0 it is -A max(ρ, 1 - clip_low); `jnp.where` in place of both,
    without their ties (`untied_minimum`). With `dual_clip` = c > 1 the objective has the lower bound cA for A < 0,
    which bounds the gradient of bad actions that have become far more likely. A ratio that is exactly at its limit is
    not clipped.
    Sources: Schulman et al. 2017 (PPO), equation 7; Yu et al. 2025 (DAPO), section 3.1, for two clips;
    Ye et al. 2020 (Mastering Complex Control in MOBA Games) for the dual clip.
    """
    advantage = lax.stop_gradient(advantage)
    ratio = likelihood_ratio(log_prob, old_log_prob)
    # Both limits are compared with ρ itself: compared with what the first one left, PPO on four environments takes 8%
    # more CPU seconds (benchmarks/LOG.md, "rooms").
    too_high = (advantage > 0) & (ratio > 1 + clip_high)
    too_low = (advantage < 0) & (ratio < 1 - clip_low)
    clipped = jnp.where(too_low, 1 - clip_low, jnp.where(too_high, 1 + clip_high, ratio))
    if dual_clip is not None:
        clipped = jnp.where((advantage < 0) & (ratio > dual_clip), dual_clip, clipped)
    return -clipped * advantage


def clipped_weight(
    log_prob: Array, old_log_prob: Array, advantage: Array, *, clip_low: Scalar = 0.2, clip_high: Scalar = 0.2
) -> Array:
    """-clip(ρ, 1 - clip_low, 1 + clip_high) A log π, the clipped ratio a constant weight: no step loses its gradient.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5, CISPO.
    """
    weight = jnp.clip(likelihood_ratio(log_prob, old_log_prob), 1 - clip_low, 1 + clip_high)
    return -lax.stop_gradient(weight * advantage) * log_prob


class PerEpisode(NamedTuple):
    """A surrogate of whole episodes, one in each column: `surrogate` of one ratio for all steps of an episode.

        s_i = ( π(o_i) / π_old(o_i) )^(1/|o_i|) = exp( mean_t log ρ_it )

    The reward is for the whole answer, and so is the importance weight; the mean of the logarithms, in place of their
    sum, keeps it near 1 whatever the length. With weights 1/(B |o_i|) the loss is the mean over episodes of that of
    s_i. At π = π_old its gradient is that of `surrogate`, step by step.

    surrogate: a loss per step that reads the ratio alone, such as `clipped_ratio`.
    Source: Zheng et al. 2025 (GSPO), equations 5 to 7.
    """

    surrogate: Callable[[Array, Array, Array], Array]


def per_episode(surrogate: Callable[[Array, Array, Array], Array] | PerEpisode) -> PerEpisode:
    """The PerEpisode of a surrogate, which may be one already."""
    return surrogate if isinstance(surrogate, PerEpisode) else PerEpisode(surrogate)


def episode_log_ratio(log_prob: Array, old_log_prob: Array, mask: Array) -> Array:
    """log s_i of `PerEpisode` at every step of episode i, [T, B]: the mean of log ρ over the real steps of a column."""
    real = mask > 0
    mean = jnp.where(real, log_prob - old_log_prob, 0.0).sum(0) / jnp.maximum(real.sum(0), 1)
    return jnp.broadcast_to(mean, log_prob.shape)


class SurrogateLoss(NamedTuple):
    """A surrogate's loss per step, and whether it clipped a step, all `[T, B]`.

    clipped_low, clipped_high: bool; clipped while the action has become less likely, or more likely, than under π_old.
    """

    loss: Array
    clipped_low: Array
    clipped_high: Array


def loss_and_clipped(
    surrogate: Callable[[Array, Array, Array], Array], log_prob: Array, old_log_prob: Array, advantage: Array
) -> SurrogateLoss:
    """The loss of any surrogate, and the steps that it clips: those with A ≠ 0 whose loss has no slope in log π(a|s).

    `clipped_weight` clips weights and keeps every slope, so by this measure it clips nothing.
    """
    loss, pullback = jax.vjp(lambda log_prob: surrogate(log_prob, old_log_prob, advantage), log_prob)
    clipped = (pullback(jnp.ones_like(loss))[0] == 0) & (advantage != 0)
    more_likely = log_prob > old_log_prob
    return SurrogateLoss(loss, clipped & ~more_likely, clipped & more_likely)


def squared_error(value: Array, old_value: Array, target: Array) -> Array:
    """(V - R)²/2; `old_value` is not read."""
    return 0.5 * (value - lax.stop_gradient(target)) ** 2


def clipped_squared_error(value: Array, old_value: Array, target: Array, *, clip: Scalar = 0.2) -> Array:
    """max((V - R)², (V_clip - R)²)/2, where V_clip = V_old + clip(V - V_old, -clip, clip).

    `clip` is in the units of the value. A value that has moved by no more than `clip` keeps the slope of (V - R)²,
    however V_old + (V - V_old) is rounded. Source: Huang et al. 2022 (The 37 Implementation Details of PPO), detail 9.
    """
    old_value = lax.stop_gradient(old_value)
    moved = value - old_value
    at_clip = old_value + jnp.where(moved > 0, clip, -clip)
    loss, clipped_loss = squared_error(value, old_value, target), squared_error(at_clip, old_value, target)
    return untied_maximum(loss, clipped_loss, where=jnp.abs(moved) > clip)

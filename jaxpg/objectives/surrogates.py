"""Losses per step, to be minimised: `[T, B]` arrays in, one loss per step out; weights and sums come afterwards.

Of the policy, `(log_prob, old_log_prob, advantage, **settings)`: `log_prob` is differentiated, `old_log_prob` belongs
to the policy that acted, and the advantage A counts as a constant. Of the critic, `(value, old_value, target,
**settings)`: `value` is differentiated, `old_value` was estimated before the update, and the target counts as a
constant. Settings may be traced.

Cases are told apart by `where`: `minimum`, `maximum` and `clip` share the slope out among what ties, which is work for
every step and helps none. A ratio or a value that is exactly at its limit is not held.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxpg.types import Array

Scalar = Array | float


def likelihood_ratio(log_prob: Array, old_log_prob: Array) -> Array:
    """ρ = π(a|s)/π_old(a|s), held at the square root of the largest float.

    An infinite ratio would turn the gradient into NaN even where the clip leaves none: 0·∞.
    """
    highest = (0.5 * jnp.log(jnp.finfo(log_prob.dtype).max)).astype(log_prob.dtype)
    difference = log_prob - old_log_prob
    return jnp.exp(jnp.where(difference > highest, highest, difference))


def score_function(log_prob: Array, old_log_prob: Array, advantage: Array) -> Array:
    """-log π(a|s) A, whose gradient is the policy gradient of samples from π itself; `old_log_prob` is not read.

    Source: Williams 1992 (REINFORCE), section 4.
    """
    return -log_prob * lax.stop_gradient(advantage)


def importance_ratio(log_prob: Array, old_log_prob: Array, advantage: Array) -> Array:
    """-ρA with ρ = π/π_old: at π = π_old the gradient of `score_function`, and correct for samples from π_old after.

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
    """-min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high) A): no gain from moving ρ past the clip, all loss from it kept.

    So ρ is held from above where A > 0 and from below where A < 0. With `dual_clip` = c > 1 the objective is at least
    cA where A < 0, which bounds the gradient of bad actions that have become far more likely.
    Sources: Schulman et al. 2017 (PPO), equation 7; Yu et al. 2025 (DAPO), section 3.1, for two clips;
    Ye et al. 2020 (Mastering Complex Control in MOBA Games) for the dual clip.
    """
    advantage = lax.stop_gradient(advantage)
    ratio = likelihood_ratio(log_prob, old_log_prob)
    above = jnp.where((advantage > 0) & (ratio > 1 + clip_high), 1 + clip_high, ratio)
    held = jnp.where((advantage < 0) & (ratio < 1 - clip_low), 1 - clip_low, above)
    if dual_clip is not None:
        held = jnp.where((advantage < 0) & (ratio > dual_clip), dual_clip, held)
    return -held * advantage


def clipped_weight(
    log_prob: Array, old_log_prob: Array, advantage: Array, *, clip_low: Scalar = 0.2, clip_high: Scalar = 0.2
) -> Array:
    """-clip(ρ, 1 - clip_low, 1 + clip_high) A log π, the clipped ratio a constant weight: no step loses its gradient.

    Source: MiniMax 2025 (MiniMax-M1), equation 4, CISPO.
    """
    weight = jnp.clip(likelihood_ratio(log_prob, old_log_prob), 1 - clip_low, 1 + clip_high)
    return -lax.stop_gradient(weight * advantage) * log_prob


def squared_error(value: Array, old_value: Array, target: Array) -> Array:
    """(V - R)²/2; `old_value` is not read."""
    return 0.5 * (value - lax.stop_gradient(target)) ** 2


def clipped_squared_error(value: Array, old_value: Array, target: Array, *, clip: Scalar = 0.2) -> Array:
    """max((V - R)², (V_clip - R)²)/2, where V_clip is V held within `clip` of the old estimate.

    `clip` is in the units of the value. Source: Huang et al. 2022 (The 37 Implementation Details of PPO), detail 9.
    """
    old_value = lax.stop_gradient(old_value)
    moved = value - old_value
    held = old_value + jnp.where(moved > 0, clip, -clip)
    loss, held_loss = squared_error(value, old_value, target), squared_error(held, old_value, target)
    return jnp.where((jnp.abs(moved) > clip) & (held_loss > loss), held_loss, loss)

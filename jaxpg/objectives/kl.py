"""The KL divergence to a reference policy as a penalty, in the reward or in the loss.

For actions from π, with `log_prob` under π and `ref_log_prob` under the reference, k1, k2 and k3 estimate KL(π ‖ ref)
per step. The gradient of an estimate depends on its place; see `reference_kl`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError, refuse_unknown
from jaxpg.objectives.surrogates import capped_log_ratio, likelihood_ratio
from jaxpg.types import Array, Scalar


def k1(log_prob: Array, ref_log_prob: Array) -> Array:
    """log(π/ref): unbiased, positive or negative, of high variance.

    Source of all three: Schulman 2020 (Approximating KL Divergence).
    """
    return log_prob - ref_log_prob


def k2(log_prob: Array, ref_log_prob: Array) -> Array:
    """log²(π/ref)/2: biased, never negative; its gradient is unbiased."""
    return 0.5 * (log_prob - ref_log_prob) ** 2


def k3(log_prob: Array, ref_log_prob: Array) -> Array:
    """ref/π - log(ref/π) - 1: unbiased, never negative, of low variance near the reference.

    ref/π is at most the square root of the largest float, as a likelihood ratio is; the gradient is 0 there, in both
    terms: that of the logarithm alone would lead away from the reference.
    """
    log_ratio = capped_log_ratio(ref_log_prob, log_prob)
    return jnp.expm1(log_ratio) - log_ratio


class ReferenceKL(NamedTuple):
    """A KL penalty in its place; one of the fields is None.

    in_reward(old_log_prob, ref_log_prob) -> `[T, B]`, added to the reward.
    in_loss(log_prob, old_log_prob, ref_log_prob) -> `[T, B]`, added to the loss per step.
    """

    in_reward: Callable[[Array, Array], Array] | None
    in_loss: Callable[[Array, Array, Array], Array] | None


def reference_kl(placement: str, coefficient: Scalar) -> ReferenceKL:
    """`coefficient` times an estimate of the KL divergence to a reference policy, in the place named by `placement`.

    For actions from π, the expected gradient is

    - "reward_k1", -k1 in the reward, a constant: ∇KL(π ‖ ref), credited like any reward (RLHF);
    - "loss_k2", k2 in the loss: ∇KL(π ‖ ref);
    - "loss_k3", k3 in the loss: ∇KL(ref ‖ π), the other direction (Shao et al. 2024 (GRPO), equation 4);
    - "loss_ratio_k3", (π/π_old) k3 in the loss: ∇KL(π ‖ ref), also for actions from an older policy π_old.

    Raises:
        UserError: `placement` is none of these, or "loss_k1", which penalises nothing.
    """
    if placement == "loss_k1":
        raise UserError(
            "loss_k1 penalises nothing: the gradient of k1 = log π - log ref is the score of π, and its expectation is "
            "zero whatever the reference. Use reward_k1, loss_k2, loss_k3 or loss_ratio_k3."
        )
    if placement in _IN_REWARD:
        return ReferenceKL(partial(_IN_REWARD[placement], coefficient=coefficient), None)
    if placement in _IN_LOSS:
        return ReferenceKL(None, partial(_IN_LOSS[placement], coefficient=coefficient))
    refuse_unknown("KL placement", placement, [*_IN_REWARD, *_IN_LOSS])


def _reward_k1(old_log_prob: Array, ref_log_prob: Array, *, coefficient: Scalar) -> Array:
    return -coefficient * lax.stop_gradient(k1(old_log_prob, ref_log_prob))


def _loss_k2(log_prob: Array, old_log_prob: Array, ref_log_prob: Array, *, coefficient: Scalar) -> Array:
    return coefficient * k2(log_prob, lax.stop_gradient(ref_log_prob))


def _loss_k3(log_prob: Array, old_log_prob: Array, ref_log_prob: Array, *, coefficient: Scalar) -> Array:
    return coefficient * k3(log_prob, lax.stop_gradient(ref_log_prob))


def _loss_ratio_k3(log_prob: Array, old_log_prob: Array, ref_log_prob: Array, *, coefficient: Scalar) -> Array:
    ratio = likelihood_ratio(log_prob, lax.stop_gradient(old_log_prob))
    return coefficient * ratio * k3(log_prob, lax.stop_gradient(ref_log_prob))


_IN_REWARD = {"reward_k1": _reward_k1}
_IN_LOSS = {"loss_k2": _loss_k2, "loss_k3": _loss_k3, "loss_ratio_k3": _loss_ratio_k3}

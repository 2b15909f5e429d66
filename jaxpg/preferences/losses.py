"""Losses on demonstrations and on preference pairs: pure functions of log-probabilities and scores.

A pair is two completions of one prompt, of which a judge chose one and rejected the other. All losses give one number
per pair, `[B]`, to be averaged over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.types import Array

Scalar = Array | float


def sequence_log_prob(log_prob: Array, mask: Array, *, per_token: bool = False) -> Array:
    """log π(y | x) = Σ_t mask_t log π(y_t | x, y_<t), `[T, B]` -> `[B]`; or its mean over the tokens of y.

    Whatever stands on masked tokens is not read. A column without any token gives 0.
    """
    total = jnp.where(mask > 0, log_prob, 0.0).sum(0)
    return total / jnp.maximum(mask.sum(0), 1) if per_token else total


def bradley_terry(chosen: Array, rejected: Array, *, margin: Array | float = 0.0, centring: Scalar = 0.0) -> Array:
    """The reward model's loss: -log σ(r_chosen - r_rejected - margin) + centring (r_chosen + r_rejected)².

    The probability that one is preferred to the other is a function of the difference of their scores (Bradley and
    Terry 1952). A margin asks for a larger difference (Touvron et al. 2023, "Llama 2", equation 2). The difference
    leaves open where zero is; the last term puts it in the middle of a pair (Eisenstein et al. 2023, "Helping or
    Herding?").

    Args:
        chosen: [B], scores of the chosen completions.
        rejected: [B], of the rejected ones.
        margin: one number, or `[B]` where some preferences are stronger than others.
        centring: weight of the last term.
    """
    return jax.nn.softplus(rejected - chosen + margin) + centring * (chosen + rejected) ** 2


def preferred(chosen: Array, rejected: Array) -> Array:
    """Whether the chosen one is the better, `[B]` float32; 1/2 where both are alike."""
    return ((jnp.sign(chosen - rejected) + 1) / 2).astype(jnp.float32)


def log_ratio_margin(
    policy_chosen: Array, policy_rejected: Array, reference_chosen: Array, reference_rejected: Array
) -> Array:
    """h = log π(y_c)/ref(y_c) - log π(y_r)/ref(y_r): how much the policy has moved towards the chosen one, `[B]`."""
    return (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)


def sigmoid(
    policy_chosen: Array,
    policy_rejected: Array,
    reference_chosen: Array,
    reference_rejected: Array,
    *,
    beta: Scalar,
    label_smoothing: Scalar = 0.0,
) -> Array:
    """Direct preference optimization: -log σ(β h), with h of `log_ratio_margin` (Rafailov et al. 2023, equation 7).

    It is Bradley-Terry on the rewards β log π/ref, of which π is the optimal policy under a KL penalty of weight β.
    Smoothed labels are the conservative DPO of Mitchell 2023.

    Args:
        policy_chosen: [B], log π of the chosen completions, summed over their tokens.
        policy_rejected: [B], of the rejected ones.
        reference_chosen: [B], the same under the reference policy.
        reference_rejected: [B], the same.
        beta: the smaller, the further the policy may move from the reference.
        label_smoothing: probability with which a label is taken to be the wrong way round.
    """
    h = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return _smoothed(lambda h: jax.nn.softplus(-beta * h), h, label_smoothing)


def ipo(
    policy_chosen: Array,
    policy_rejected: Array,
    reference_chosen: Array,
    reference_rejected: Array,
    *,
    beta: Scalar,
    label_smoothing: Scalar = 0.0,
) -> Array:
    """Identity preference optimization: (h - 1/(2β))² (Azar et al. 2023, equation 17, with τ = β).

    Its minimum lies at a finite h, also where all labels agree, so the policy does not run away from the reference.
    The paper's log-probabilities are of whole completions. `dpo` gives it means over tokens, as its authors do in
    practice: else one target stands for long and for short completions. Arguments as in `sigmoid`; with smoothed
    labels the minimum lies at (1 - 2 label_smoothing)/(2β), which is that of the paper for labels of such a noise.
    """
    h = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return _smoothed(lambda h: (h - 1 / (2 * beta)) ** 2, h, label_smoothing)


def hinge(
    policy_chosen: Array,
    policy_rejected: Array,
    reference_chosen: Array,
    reference_rejected: Array,
    *,
    beta: Scalar,
    label_smoothing: Scalar = 0.0,
) -> Array:
    """max(0, 1 - β h): pairs that are far enough apart count no more.

    The hinge of SLiC (Zhao et al. 2023, section 2), on log-probabilities relative to the reference, as Liu et al. 2023
    ("Statistical Rejection Sampling", section 3) put it beside DPO's. Arguments as in `sigmoid`.
    """
    h = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return _smoothed(lambda h: jax.nn.relu(1 - beta * h), h, label_smoothing)


def _smoothed(loss: Callable[[Array], Array], h: Array, label_smoothing: Scalar) -> Array:
    """The expected loss where a label is the wrong way round with probability `label_smoothing`."""
    return (1 - label_smoothing) * loss(h) + label_smoothing * loss(-h)


class PairLoss(NamedTuple):
    """A loss on pairs, and whether it reads means over tokens where others read sums."""

    function: Callable[..., Array]
    per_token: bool = False


PAIR_LOSSES = {"sigmoid": PairLoss(sigmoid), "ipo": PairLoss(ipo, per_token=True), "hinge": PairLoss(hinge)}
"""What a person may name."""

"""Losses on demonstrations and on preference pairs: pure functions of log-probabilities and scores.

A pair is two completions of one prompt, of which a judge chose one and rejected the other. Every loss on pairs returns
one number per pair, `[B]`; the learner averages them over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.types import Array, Scalar


def sequence_log_prob(log_prob: Array, mask: Array, *, per_token: bool = False) -> Array:
    """log π(y | x) = Σ_t mask_t log π(y_t | x, y_<t), `[T, B]` -> `[B]`; or its mean over the tokens of y.

    Values on masked tokens are ignored, NaN too. A column without any token gives 0.
    """
    total = jnp.where(mask > 0, log_prob, 0.0).sum(0)
    return total / jnp.maximum(mask.sum(0), 1) if per_token else total


def bradley_terry(chosen: Array, rejected: Array, *, margin: Array | float = 0.0, centring: Scalar = 0.0) -> Array:
    """The reward model's loss: -log σ(r_chosen - r_rejected - margin) + centring (r_chosen + r_rejected)².

    The probability that one completion is preferred to the other is a function of the difference of their scores
    (Bradley and Terry 1952). A margin requires a larger difference (Touvron et al. 2023, "Llama 2", equation 2). The
    difference does not determine where zero is; the last term puts it in the middle of a pair (Eisenstein et al. 2023,
    "Helping or Herding?").

    Args:
        chosen: [B], scores of the chosen completions.
        rejected: [B], of the rejected ones.
        margin: one number, or `[B]` where some preferences are stronger than others.
        centring: weight of the last term.
    """
    return jax.nn.softplus(rejected - chosen + margin) + centring * (chosen + rejected) ** 2


def preferred(chosen: Array, rejected: Array) -> Array:
    """1 where the chosen completion has the higher score, 0 where the rejected one has, else 1/2; `[B]` float32."""
    return ((jnp.sign(chosen - rejected) + 1) / 2).astype(jnp.float32)


def log_ratio_margin(
    policy_chosen: Array, policy_rejected: Array, reference_chosen: Array, reference_rejected: Array
) -> Array:
    """h = log π(y_c)/ref(y_c) - log π(y_r)/ref(y_r): how far the policy has moved towards the chosen one, `[B]`."""
    return (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)


def sigmoid(h: Array, *, beta: Scalar, label_smoothing: Scalar = 0.0) -> Array:
    """Direct preference optimization: -log σ(β h) (Rafailov et al. 2023, equation 7).

    It is Bradley-Terry on the rewards β log π/ref, of which π is the optimal policy under a KL penalty of weight β.
    Smoothed labels are the conservative DPO of Mitchell 2023.

    Args:
        h: [B], see `log_ratio_margin`, of log-probabilities summed over tokens.
        beta: the smaller, the further the policy may move from the reference.
        label_smoothing: the assumed probability that a label is wrong.
    """
    return _smoothed(lambda h: jax.nn.softplus(-beta * h), h, label_smoothing)


def ipo(h: Array, *, beta: Scalar, label_smoothing: Scalar = 0.0) -> Array:
    """Identity preference optimization: (h - 1/(2β))² (Azar et al. 2023, equation 17, with τ = β).

    Its minimum is at a finite h, even where all labels agree, so the policy does not drift ever further from the
    reference. The paper sums log-probabilities over a completion. `dpo` passes means over its tokens, as the authors do
    in practice; otherwise short and long completions would have the same target. With smoothed labels the minimum is
    at (1 - 2 label_smoothing)/(2β), which is the paper's for labels with that noise.

    Args:
        h: [B], see `log_ratio_margin`.
        beta: as in `sigmoid`.
        label_smoothing: as in `sigmoid`.
    """
    return _smoothed(lambda h: (h - 1 / (2 * beta)) ** 2, h, label_smoothing)


def hinge(h: Array, *, beta: Scalar, label_smoothing: Scalar = 0.0) -> Array:
    """max(0, 1 - β h): pairs that are far enough apart have no gradient.

    The hinge of SLiC (Zhao et al. 2023, section 2), on log-probabilities relative to the reference, as Liu et al. 2023
    ("Statistical Rejection Sampling", section 3) put it beside DPO's.

    Args:
        h: [B], see `log_ratio_margin`.
        beta: as in `sigmoid`.
        label_smoothing: as in `sigmoid`.
    """
    return _smoothed(lambda h: jax.nn.relu(1 - beta * h), h, label_smoothing)


def _smoothed(loss: Callable[[Array], Array], h: Array, label_smoothing: Scalar) -> Array:
    """The expected loss where a label is wrong with probability `label_smoothing`."""
    return (1 - label_smoothing) * loss(h) + label_smoothing * loss(-h)


class PairLoss(NamedTuple):
    """A loss on pairs, and whether its log-probabilities are means over tokens (others are sums)."""

    function: Callable[..., Array]
    per_token: bool = False


PAIR_LOSSES = {
    "sigmoid": PairLoss(sigmoid),
    "ipo": PairLoss(ipo, per_token=True),
    "hinge": PairLoss(hinge),
}
"""The losses of `dpo` by name."""

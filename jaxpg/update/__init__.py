"""From a loss to new parameters: gradient steps, epochs of minibatches, trust regions, optimizers."""

from jaxpg.update.gradients import apply_gradient, gradient_step, summed_gradient
from jaxpg.update.minibatches import minibatch_epochs
from jaxpg.update.normalization import (
    Moments,
    NormalizationState,
    discounted_reward_sums,
    initial_moments,
    normalize_obs,
    normalize_rollout,
    scale_rewards,
    update_moments,
    with_normalized_obs,
)
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.optimizers import adam, constant, flat_if_small, linear_decay, sgd
from jaxpg.update.shuffle import random_permutations
from jaxpg.update.trust_region import conjugate_gradient, trust_region_step

__all__ = [
    "Batch",
    "Moments",
    "NormalizationState",
    "Objective",
    "adam",
    "apply_gradient",
    "conjugate_gradient",
    "constant",
    "discounted_reward_sums",
    "flat_if_small",
    "gradient_step",
    "initial_moments",
    "linear_decay",
    "minibatch_epochs",
    "normalize_obs",
    "normalize_rollout",
    "random_permutations",
    "scale_rewards",
    "sgd",
    "summed_gradient",
    "trust_region_step",
    "update_moments",
    "with_normalized_obs",
]

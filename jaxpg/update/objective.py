"""What an update reads and what it minimises: Batch and Objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.types import Array, Metrics, Params, Rollout, Tree


class Batch(NamedTuple):
    """What the losses read, leaves `[T, B, ...]`.

    advantage, target: of the credit; old_value: the critic's value before any update.
    weight: of each step in the loss; sums to 1 (or as `loss_weights` says) over all devices.
    share: the same, but summing to 1 over the minibatch on all devices, for metrics that are means; `()` until a
        minibatch is made.
    reference_log_prob: of the action under the reference policy, `()` without one.
    """

    rollout: Rollout
    advantage: Array
    target: Array
    old_value: Array
    weight: Array
    minibatch_weight: Tree
    reference_log_prob: Tree


Loss = Callable[[Params, Batch], tuple[Array, Metrics]]


class Objective(NamedTuple):
    """What is to be made small. Losses return their value on this device and additive metrics.

    policy_loss, value_loss: None where there is no critic.
    distribution(params, batch): the policy's distribution over actions, [T, B].
    normalize(advantage, mask): how advantages are scaled before they are used, once per minibatch.
    sequential: the policy reads whole columns, which minibatches must not cut.
    """

    policy_loss: Loss
    value_loss: Loss | None
    distribution: Callable[[Params, Batch], Any]
    normalize: Callable[[Array, Array], Array]
    needs_trajectories: bool

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Metrics]:
        """The policy's loss plus the critic's."""
        policy_loss, metrics = self.policy_loss(params, batch)
        if self.value_loss is None:
            return policy_loss, metrics
        value_loss, value_metrics = self.value_loss(params, batch)
        return policy_loss + value_loss, {**metrics, **value_metrics}

    def as_minibatch(self, batch: Batch) -> Batch:
        """The batch made one minibatch: what depends on all its steps, before it is cut into chunks."""
        total = jnp.maximum(collectives.psum(batch.weight.sum()), jnp.finfo(batch.weight.dtype).tiny)
        return batch._replace(
            advantage=self.normalize(batch.advantage, batch.rollout.loss_mask), minibatch_weight=batch.weight / total
        )

"""What an update reads and what it minimises: Batch and Objective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.types import Array, Key, Metrics, Params, Prompt, Rollout, Tree


class Batch(NamedTuple):
    """What the losses read.

    rollout: the experience, `[T, B, ...]`; all other fields are `[T, B]`.
    advantage: psi of each step (objectives/advantages.py), `()` for losses without one.
    target: what a critic regresses on.
    old_value: the critic's value before any update of this batch, `()` for losses that do not read it.
    weight: of each step in the loss; sums to 1 (or as `loss_weights` says) over all devices.
    minibatch_weight: the same, but summing to 1 over the minibatch on all devices, for metrics that are means; `()`
        until `Objective.as_minibatch` has made a minibatch.
    reference_log_prob: of the action under the reference policy, `()` without one.
    noise: random numbers for `Policy.evaluate`, leaves `[T, B, ...]`; `()` until `Objective.draw_noise` has drawn them,
        and for policies without.
    """

    rollout: Rollout
    advantage: Tree
    target: Array
    old_value: Tree
    weight: Array
    minibatch_weight: Tree
    reference_log_prob: Tree
    noise: Tree = ()

    def map_columns(self, function: Callable[[int, Array], Any]) -> Batch:
        """`function(axis, x)` of every array, whose columns are on that axis."""
        per_step = self[1:]  # all fields but the rollout
        return Batch(self.rollout.map_columns(function), *jax.tree.map(partial(function, 1), per_step))


Loss = Callable[[Params, Batch], tuple[Array, Metrics]]


class TextReader(NamedTuple):
    """How networks read texts that are packed side by side (types.PackedTexts).

    group_size: this many neighbouring columns of the batch have the same prompt.
    read_prompts(params, prompts) -> memory of prompts `[N, P]` that several texts share, see `Policy.read_prompts`;
        None where each text has to contain its own.
    """

    group_size: int
    read_prompts: Callable[[Params, Prompt], Tree] | None


COUNTED = "counted"
"""The metric that says whether a minibatch has a step which counts: the sum of `minibatch_weight`, 1 or 0."""

MEANS_OVER_STEPS = ("entropy", "approx_kl", "clipped_high", "clipped_low", "reference_kl")
"""Metrics of a loss that are means over the steps of a minibatch, by `minibatch_weight`."""


class JointLoss(NamedTuple):
    """The sum of two losses by one evaluation of both networks, for speed alone: see `types.JointEvaluation`.

    of: the losses of policy and critic that it is the sum of. An objective in which one has been replaced sums its own.
    loss(params, batch) -> loss, metrics
    """

    of: tuple[Loss, Loss]
    loss: Loss


class Objective(NamedTuple):
    """What an update minimises. A loss returns its sum over the steps of this device, and additive metrics.

    policy_loss(params, batch) -> loss, metrics
    value_loss(params, batch) -> loss, metrics; None without a critic.
    distribution(params, batch): the policy's distribution over actions, `[T, B]`.
    normalize(advantage, mask): the scale of the advantages, once per minibatch.
    needs_trajectories: the policy or its loss reads whole columns, which minibatches must not cut.
    padded: each column is one whole episode, with padding after its end.
    texts: each column is a text that a transformer reads at once, rather than the steps of one environment.
    text_reader: how the losses read texts side by side; None where they take one text per column alone.
    noise: that of the policy, see `Policy.noise`.
    joint_loss: the sum of these two losses, of networks that are evaluated together; None where they are not.
    """

    policy_loss: Loss
    value_loss: Loss | None
    distribution: Callable[[Params, Batch], Any]
    normalize: Callable[[Array, Array], Array]
    needs_trajectories: bool
    padded: bool = False
    texts: bool = False
    text_reader: TextReader | None = None
    noise: Callable[[Key, tuple[int, int]], Tree] | None = None
    joint_loss: JointLoss | None = None

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Metrics]:
        """The policy's loss plus the critic's; COUNTED is among the metrics."""
        loss, metrics = self._loss(params, batch)
        return loss, {**metrics, COUNTED: batch.minibatch_weight.sum()}

    def _loss(self, params: Params, batch: Batch) -> tuple[Array, Metrics]:
        if self.joint_loss and self.joint_loss.of == (self.policy_loss, self.value_loss):
            return self.joint_loss.loss(params, batch)
        policy_loss, metrics = self.policy_loss(params, batch)
        if self.value_loss is None:
            return policy_loss, metrics
        value_loss, value_metrics = self.value_loss(params, batch)
        return policy_loss + value_loss, {**metrics, **value_metrics}

    def as_minibatch(self, batch: Batch) -> Batch:
        """The batch with all that depends on the whole minibatch: normalised advantages and `minibatch_weight`.

        To be called before a minibatch is cut into chunks.
        """
        total = jnp.maximum(collectives.psum(batch.weight.sum()), jnp.finfo(batch.weight.dtype).tiny)
        advantage = batch.advantage
        if jax.tree.leaves(advantage):
            normalized = self.normalize(advantage, batch.rollout.loss_mask)
            advantage = per_step("algorithm's normalize", normalized, batch.weight)
        return batch._replace(
            advantage=advantage,
            minibatch_weight=collectives.kept_apart(batch.weight) / total,
        )

    def draw_noise(self, key: Key, batch: Batch) -> Batch:
        """The batch with the policy's noise for all of its steps; unchanged for a policy without."""
        if self.noise is None:
            return batch
        steps, columns = batch.weight.shape
        return batch._replace(noise=self.noise(collectives.device_key(key), (steps, columns)))


def per_step(name: str, x: Any, steps: Array) -> Array:
    """`x`, which a function of the user's may have given for these steps. Another shape would be broadcast, unnoticed.

    Raises:
        UserError: it is no array, or has another shape than `steps`.
    """
    expected = f"The {name} must give one number per step, {list(steps.shape)} here, not"
    if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int):
        raise UserError(f"{expected} {'None' if x is None else f'a {type(x).__name__}'}.")
    if jnp.shape(x) != steps.shape:
        raise UserError(
            f"{expected} an array of shape {list(jnp.shape(x))}: means and sums over steps are those of loss_weights."
        )
    return jnp.asarray(x)

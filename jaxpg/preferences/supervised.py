"""The learner that fine-tuning, both reward models and DPO share: draw a batch, sum its loss, take a step of Adam."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg import update
from jaxpg.errors import UserError
from jaxpg.objectives import loss_weights
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import env_keys
from jaxpg.rollout.metrics import logged
from jaxpg.types import Actor, Array, Key, Learner, Metrics, Params, Rollout, Scalar, Tree
from jaxpg.update import optimizers
from jaxpg.user_input.domains import check_scalars, check_whole
from jaxpg.vectorize import copy_tree


class SupervisedSettings(NamedTuple):
    """The settings that every learner from examples has.

    batch_size: examples per step, over all devices.
    learning_rate: step size of Adam.
    anneal_steps: completion tokens over which the step size falls linearly to zero; None keeps it constant.
    max_grad_norm: the gradient is scaled down to this global norm; None never scales it.
    micro_batches: equal parts of a device's batch whose gradients are computed one after another and added.
    """

    batch_size: int
    learning_rate: Scalar
    anneal_steps: int | None
    max_grad_norm: float | None
    micro_batches: int


class SupervisedBatch(NamedTuple):
    """A batch of examples.

    rollout: completions, as a policy would have collected them.
    weight: [T, B], of each token; sums to 1 over all devices.
    noise: of the policy, for this step, leaves `[T, B, ...]`; `()` for one without (`Policy.noise`).
    """

    rollout: Rollout
    weight: Array
    noise: Tree = ()

    def map_columns(self, function: Callable[[int, Array], Any]) -> SupervisedBatch:
        """`function(axis, x)` of every array, whose columns are on that axis."""
        weight, noise = jax.tree.map(partial(function, 1), (self.weight, self.noise))
        return SupervisedBatch(self.rollout.map_columns(function), weight, noise)


class SupervisedState(NamedTuple):
    """What a run carries from step to step.

    reference: the parameters of the policy to begin with, `()` where nothing needs them.
    steps: completion tokens trained on so far, int32.
    """

    params: Params
    opt_state: Tree
    reference: Tree
    steps: Array


SupervisedLoss = Callable[[Params, Tree, SupervisedBatch], tuple[Array, Metrics]]
"""params, reference, batch -> the loss and additive metrics, both summed over the batch.

Every term is divided by the size of the whole batch, so that sums over micro-batches and devices are its means.
"""


def supervised(
    init_params: Callable[[Key], Params],
    draw: Callable[[Tree, Array], Rollout],
    loss: SupervisedLoss,
    actor: Callable[[Params], Actor],
    settings: SupervisedSettings,
    *,
    from_policy: Callable[[Params, Tree], Params] = lambda params, policy: Params(policy, ()),
    init_reference: Callable[[Params, Key], Tree] | None = None,
    noise: Callable[[Key, tuple[int, int]], Tree] | None = None,
) -> Learner:
    """The learner that minimises a loss on examples, by Adam with the eps of the ladder, 1e-5 (torch and TRL: 1e-8).

    Args:
        init_params: key -> initial parameters.
        draw: reference, keys `[n]`, one per example -> their completions, columns in the order of the keys.
        loss: see `SupervisedLoss`.
        actor: parameters -> the actor that uses them.
        settings: see `SupervisedSettings`.
        from_policy: own parameters, a policy's parameters -> the parameters to start from (`Learner.with_policy`).
        init_reference: initial parameters, key -> a reference policy until `with_policy` gives one, of which a copy is
            kept; None to keep none.
        noise: that of the policy, see `Policy.noise`.

    Raises:
        UserError: a number outside of its domain (domains.py); batch_size cannot be divided by micro_batches, or (in
            `step`) by micro_batches times devices.
    """
    check_scalars(settings._asdict())
    _check_division(settings, shards=1)
    optimizer = optimizers.adam(max_grad_norm=settings.max_grad_norm)
    schedule = optimizers.annealed(settings.learning_rate, settings.anneal_steps)

    def init(key: Key) -> SupervisedState:
        params = init_params(key)
        reference = init_reference(params, key) if init_reference else ()
        return SupervisedState(params, optimizer.init(params), reference, steps=jnp.zeros((), jnp.int32))

    def step(state: SupervisedState, key: Key) -> tuple[SupervisedState, Metrics]:
        shards = collectives.num_shards()
        _check_division(settings, shards)
        if noise:
            key, noise_key = jax.random.split(key)
        rollout = draw(state.reference, env_keys(key, settings.batch_size // shards))
        batch = SupervisedBatch(rollout, loss_weights.per_step(rollout.loss_mask))
        if noise:
            steps, columns = rollout.loss_mask.shape
            batch = batch._replace(noise=noise(collectives.device_key(noise_key), (steps, columns)))
        gradient, metrics = update.summed_gradient(
            lambda params, part: loss(params, state.reference, part),
            state.params,
            batch,
            settings.micro_batches,
        )
        rate = schedule(state.steps)
        params, opt_state, norms = update.apply_gradient(optimizer, rate, gradient, state.params, state.opt_state)
        steps = state.steps + collectives.psum(rollout.steps.mask.sum()).astype(jnp.int32)
        metrics = lax.stop_gradient(metrics) | norms | {"learning_rate": rate}
        state = state._replace(params=params, opt_state=opt_state, steps=steps)
        return state, logged(metrics, steps)

    def with_policy(state: SupervisedState, policy: Tree) -> SupervisedState:
        reference = copy_tree(policy) if init_reference else ()
        return state._replace(params=from_policy(state.params, copy_tree(policy)), reference=reference)

    return Learner(init, step, lambda state: actor(state.params), with_policy)


def _check_division(settings: SupervisedSettings, shards: int) -> None:
    batch_size = check_whole("batch_size", settings.batch_size)
    micro_batches = check_whole("micro_batches", settings.micro_batches)
    if batch_size % (micro_batches * shards):
        devices = f" on each of {shards} devices" if shards > 1 else ""
        raise UserError(
            f"batch_size = {batch_size} cannot be cut into {micro_batches} equal micro_batches{devices}: "
            f"make it a multiple of {micro_batches * shards}."
        )

"""The loop that fine-tuning, the reward model and DPO share: examples, a loss that is a sum, a step of Adam."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpg import update
from jaxpg.errors import UserError
from jaxpg.objectives import loss_weights
from jaxpg.parallel import collectives
from jaxpg.rollout.collector import env_keys
from jaxpg.types import Actor, Array, Key, Learner, Metrics, Params, Rollout, Tree
from jaxpg.vectorize import copy_tree


class SupervisedBatch(NamedTuple):
    """A batch to learn from.

    rollout: completions, as a policy would have collected them.
    weight: [T, B], of each token; sums to 1 over all devices.
    """

    rollout: Rollout
    weight: Array


class SupervisedState(NamedTuple):
    """All that one run carries from iteration to iteration.

    reference: the policy's parameters as it began, `()` where nothing is measured against them.
    steps: completion tokens that were trained on so far, int32.
    """

    params: Params
    opt_state: Tree
    reference: Tree
    steps: Array


Loss = Callable[[Params, Tree, SupervisedBatch], tuple[Array, Metrics]]
"""params, reference, examples -> the loss and additive metrics, summed over these examples."""


def supervised(
    init_params: Callable[[Key], Params],
    draw: Callable[[Array], Rollout],
    loss: Loss,
    actor: Callable[[Params], Actor],
    *,
    adopted: Callable[[Params, Tree], Params] = lambda own, policy: Params(policy, ()),
    with_reference: bool = False,
    batch_size: int,
    learning_rate: float,
    anneal_steps: int | None,
    max_grad_norm: float | None,
    micro_batches: int,
) -> Learner:
    """The learner from examples.

    Args:
        init_params: the first parameters.
        draw: keys `[n]` of examples -> their completions, whose columns lie in the order of the keys.
        loss: summed over examples, so that the sum over parts of a batch and over devices is that of the batch.
        actor: who plays what was learned.
        adopted: own parameters, those of a policy -> parameters to begin with instead.
        with_reference: whether to keep the policy as it began.
        batch_size: examples per step, on all devices together.
        learning_rate: step size of Adam.
        anneal_steps: completion tokens over which it falls linearly to zero; constant if not given.
        max_grad_norm: the gradient is scaled down to this global norm.
        micro_batches: parts, taken one after the other, that the batch of a device is cut into.

    Raises:
        UserError: a batch that does not divide, here or, over devices, in `step`.
    """
    _check_division(batch_size, micro_batches, 1)
    optimizer = update.adam(max_grad_norm=max_grad_norm)
    schedule = (
        partial(update.constant, value=learning_rate)
        if anneal_steps is None
        else partial(update.linear_decay, value=learning_rate, over=anneal_steps)
    )

    def reference(params: Params) -> Tree:
        return copy_tree(params.policy) if with_reference else ()

    def init(key: Key) -> SupervisedState:
        params = init_params(key)
        return SupervisedState(params, optimizer.init(params), reference(params), steps=jnp.zeros((), jnp.int32))

    def step(state: SupervisedState, key: Key) -> tuple[SupervisedState, Metrics]:
        _check_division(batch_size, micro_batches, collectives.num_shards())
        rollout = draw(env_keys(key, batch_size // collectives.num_shards()))
        examples = SupervisedBatch(rollout, loss_weights.per_step(rollout.loss_mask))
        gradient, metrics = update.summed_gradient(
            lambda params, part: loss(params, state.reference, part), state.params, examples, micro_batches, _part
        )
        rate = schedule(state.steps)
        params, opt_state, norm = update.apply_gradient(optimizer, rate, gradient, state.params, state.opt_state)
        steps = state.steps + collectives.psum(rollout.loss_mask.sum()).astype(jnp.int32)
        metrics = lax.stop_gradient(metrics) | {"gradient_norm": norm, "learning_rate": rate}
        state = state._replace(params=params, opt_state=opt_state, steps=steps)
        return state, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()} | {"steps": steps}

    def with_policy(state: SupervisedState, policy: Tree) -> SupervisedState:
        params = adopted(state.params, policy)
        return state._replace(params=params, reference=reference(params))

    return Learner(init, step, lambda state: actor(state.params), with_policy)


def _part(examples: SupervisedBatch, i: Array | int, parts: int) -> SupervisedBatch:
    """The i-th of so many runs of neighbouring columns."""
    size = examples.weight.shape[1] // parts

    def pick(axis: int, x: Array) -> Array:
        return collectives.shard_columns(lax.dynamic_slice_in_dim(x, i * size, size, axis), axis)

    return SupervisedBatch(examples.rollout.map_columns(pick), pick(1, examples.weight))


def _check_division(batch_size: int, micro_batches: int, shards: int) -> None:
    if batch_size < 1 or micro_batches < 1:
        raise UserError(f"batch_size = {batch_size} and micro_batches = {micro_batches} must be at least 1.")
    if batch_size % (micro_batches * shards):
        over = f" on each of {shards} devices" if shards > 1 else ""
        raise UserError(
            f"batch_size = {batch_size} cannot be cut into {micro_batches} equal micro_batches{over}: "
            f"make it a multiple of {micro_batches * shards}."
        )

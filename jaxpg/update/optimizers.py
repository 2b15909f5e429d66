"""Optimizers and step-size schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxpg.types import Array, Tree

FLAT_BELOW = 2**20


def adam(*, max_grad_norm: Array | float | None, eps: Array | float = 1e-5) -> optax.GradientTransformation:
    """Adam's direction after clipping the gradient by its global norm. eps 1e-5 is detail 3 of the 37 of PPO."""
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return flat_if_small(optax.chain(clip, optax.scale_by_adam(eps=eps)))


def flat_if_small(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer on one vector of all parameters: a handful of operations per update instead of a handful per array.

    Of FLAT_BELOW numbers and more the arrays stay as they are: copying them would cost more than it saves, and devices
    that share the parameters hold parts of single arrays.
    """
    flat = optax.flatten(optimizer)

    def suited(tree: Tree) -> optax.GradientTransformation:
        return flat if sum(x.size for x in jax.tree.leaves(tree)) < FLAT_BELOW else optimizer

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        return suited(updates).update(updates, state, params)

    return optax.GradientTransformation(lambda params: suited(params).init(params), update)


def sgd(*, max_grad_norm: float | None = None) -> optax.GradientTransformation:
    """The gradient itself, after clipping by its global norm."""
    return optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)


def constant(steps: Array, *, value: Array | float) -> Array:
    """The same step size throughout."""
    return jnp.asarray(value, jnp.float32)


def linear_decay(steps: Array, *, value: Array | float, over: int) -> Array:
    """From `value` to zero over so many environment steps (detail 4 of the 37 of PPO)."""
    return value * jnp.maximum(1 - steps / over, 0.0)

"""A natural-gradient step in a trust region: conjugate gradients and a line search."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg.parallel import collectives
from jaxpg.types import Array, Key, Metrics, Params, Tree
from jaxpg.update.gradients import summed_gradient
from jaxpg.update.minibatches import minibatch_epochs
from jaxpg.update.objective import Batch, Loss, Objective


def trust_region_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
    *,
    max_kl: Array | float,
    conjugate_steps: int,
    damping: Array | float,
    backtracks: int,
    value_epochs: int,
    value_minibatches: int,
) -> tuple[Params, Tree, Metrics]:
    """A natural-gradient step on the policy, then epochs of ordinary ones on the critic.

        s = F^-1 g by conjugate gradients,  step = sqrt(2 max_kl / s.F s) s,

    halved until the loss falls and the mean KL(old || new) is at most `max_kl`, at most `backtracks` times; else the
    policy stays (Schulman et al. 2015, "Trust Region Policy Optimization", appendix C). F is the Fisher information,
    the Hessian of that KL at the old parameters, plus `damping` on its diagonal. `optimizer` serves the critic alone.
    """
    as_minibatch = objective.as_minibatch(batch)
    old = lax.stop_gradient(objective.distribution(params, batch))
    flat, unravel = ravel_pytree(params.policy)

    def loss(flat: Array) -> Array:
        return collectives.psum(objective.policy_loss(params._replace(policy=unravel(flat)), as_minibatch)[0])

    def local_kl(flat: Array) -> Array:
        return (
            as_minibatch.minibatch_weight * old.kl(objective.distribution(params._replace(policy=unravel(flat)), batch))
        ).sum()

    def fisher(vector: Array) -> Array:
        return collectives.psum(jax.jvp(jax.grad(local_kl), (flat,), (vector,))[1]) + damping * vector

    gradient, metrics = summed_gradient(objective.policy_loss, params, as_minibatch)
    descent = -ravel_pytree(gradient.policy)[0]
    direction = conjugate_gradient(fisher, descent, conjugate_steps)
    curvature = direction @ fisher(direction)
    step = jnp.sqrt(2 * max_kl / jnp.maximum(curvature, 1e-12)) * direction
    before = loss(flat)

    def try_step(carry: tuple[Array, Array, Array], scale: Array) -> tuple[tuple[Array, Array, Array], None]:
        best, best_kl, accepted = carry
        candidate = flat + scale * step
        kl = collectives.psum(local_kl(candidate))
        accept = ~accepted & (loss(candidate) < before) & (kl <= max_kl)
        return (jnp.where(accept, candidate, best), jnp.where(accept, kl, best_kl), accepted | accept), None

    start = (flat, jnp.zeros_like(before), jnp.zeros((), bool))
    (flat, kl, accepted), _ = lax.scan(try_step, start, 0.5 ** jnp.arange(backtracks, dtype=flat.dtype))
    params = params._replace(policy=unravel(flat))
    metrics = {**metrics, "kl": kl, "accepted": accepted.astype(flat.dtype)}

    if objective.value_loss is not None:
        critic = objective._replace(policy_loss=partial(_of_critic_alone, objective.value_loss), value_loss=None)
        params, opt_state, value_metrics = minibatch_epochs(
            critic, optimizer, learning_rate, params, opt_state, batch, key,
            epochs=value_epochs, num_minibatches=value_minibatches,
        )  # fmt: skip
        metrics = {**value_metrics, **metrics}
    return params, opt_state, metrics


def _of_critic_alone(value_loss: Loss, params: Params, batch: Batch) -> tuple[Array, Metrics]:
    """The critic may read a torso that belongs to the policy, whose step has been taken."""
    return value_loss(params._replace(policy=lax.stop_gradient(params.policy)), batch)


def conjugate_gradient(matvec: Callable[[Array], Array], b: Array, steps: int) -> Array:
    """`steps` of conjugate gradients on A x = b from x = 0, A symmetric positive definite (Hestenes and Stiefel 1952).

    Stops moving where the residual has vanished, so that extra steps do no harm.
    """

    def step(carry: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        x, residual, direction, norm = carry
        product = matvec(direction)
        curvature = direction @ product
        moving = (norm > 1e-10 * (b @ b)) & (curvature > 0)
        alpha = jnp.where(moving, norm / jnp.where(moving, curvature, 1.0), 0.0)
        x, residual = x + alpha * direction, residual - alpha * product
        new_norm = residual @ residual
        beta = jnp.where(moving, new_norm / jnp.where(moving, norm, 1.0), 0.0)
        return (x, residual, jnp.where(moving, residual + beta * direction, direction), new_norm), None

    (x, *_), _ = lax.scan(step, (jnp.zeros_like(b), b, b, b @ b), None, steps)
    return x

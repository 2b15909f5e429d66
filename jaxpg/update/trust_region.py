"""A natural-gradient step in a trust region (TRPO): gradient, direction, line search, then epochs of the critic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg.errors import UserError
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
    """A natural-gradient step on the policy, then epochs of ordinary gradient steps on the critic.

        minimise loss(policy)    subject to    mean KL(old || new) <= max_kl

    The step is that of `natural_step`, shortened by `line_search`. `optimizer` and `learning_rate` are for the critic
    alone. Source: Schulman et al. 2015 (TRPO), appendix C.

    Raises:
        UserError: the policy's distribution has no `kl`.
    """
    if objective.noise:  # of all candidates the same, so that the KL is between policies and not between noises
        key, noise_key = jax.random.split(key)
        batch = objective.draw_noise(noise_key, batch)
    minibatch = objective.as_minibatch(batch)
    old = objective.distribution(lax.stop_gradient(params), batch)
    if not hasattr(old, "kl"):
        raise UserError(
            f"A step in a trust region measures KL(old || new): give the policy's distribution, "
            f"a {type(old).__name__}, the method kl(other), as those of jaxpg/models/distributions.py have it."
        )
    flat, unravel = ravel_pytree(params.policy)

    def with_policy(flat: Array) -> Params:
        return params._replace(policy=unravel(flat))

    def loss(flat: Array) -> Array:
        return collectives.psum(objective.policy_loss(with_policy(flat), minibatch)[0])

    def local_kl(flat: Array) -> Array:  # of the steps on this device
        return (minibatch.minibatch_weight * old.kl(objective.distribution(with_policy(flat), batch))).sum()

    gradient, metrics = summed_gradient(objective.policy_loss, params, minibatch)
    descent = -ravel_pytree(gradient.policy)[0]
    step = natural_step(
        partial(_fisher_product, local_kl, flat, damping), descent, max_kl=max_kl, conjugate_steps=conjugate_steps
    )
    found = line_search(loss, local_kl, flat, step, max_kl=max_kl, backtracks=backtracks)
    params = with_policy(found.params)
    metrics = {
        **metrics,
        "kl": found.kl,
        "accepted": found.accepted.astype(flat.dtype),
        "policy_gradient_norm": jnp.linalg.norm(descent),
    }
    if objective.value_loss is None:
        return params, opt_state, metrics
    fitted, opt_state, value_metrics = minibatch_epochs(
        _critic_objective(objective, objective.value_loss), optimizer, learning_rate, params, opt_state, batch, key,
        epochs=value_epochs, num_minibatches=value_minibatches,
    )  # fmt: skip
    # Weight decay moves parameters that have no gradient: the policy stays where the search ended.
    return fitted._replace(policy=params.policy), opt_state, {**value_metrics, **metrics}


def _fisher_product(local_kl: Callable[[Array], Array], flat: Array, damping: Array | float, vector: Array) -> Array:
    """(F + damping I) v, F being the Hessian of the mean KL(old || new) at the old parameters, on all devices."""
    return collectives.psum(jax.jvp(jax.grad(local_kl), (flat,), (vector,))[1]) + damping * vector


def natural_step(
    fisher_product: Callable[[Array], Array], descent: Array, *, max_kl: Array | float, conjugate_steps: int
) -> Array:
    """sqrt(2 max_kl / s.F s) s with s = F^-1 g: the step along the natural gradient whose quadratic KL is `max_kl`.

    `descent` `[n]` is g, the negative gradient; `fisher_product(v)` is F v. With damping it is (F + damping I) v, and
    the quadratic KL is that of F + damping I. Source: Schulman et al. 2015, appendix C.

    The step is the same for every multiple of g: it is computed for g over its largest number, so that no square
    vanishes or overflows.
    """
    scale = jnp.abs(descent).max()
    descent = descent / jnp.where(scale > 0, scale, 1.0)
    direction = conjugate_gradient(fisher_product, descent, conjugate_steps)
    curvature = direction @ fisher_product(direction)
    return jnp.sqrt(2 * max_kl / jnp.maximum(curvature, jnp.finfo(curvature.dtype).tiny)) * direction


class LineSearchResult(NamedTuple):
    """The result of a line search: flat parameters `[n]`, KL(old || new), and whether a step was accepted."""

    params: Array
    kl: Array
    accepted: Array


def line_search(
    loss: Callable[[Array], Array],
    local_kl: Callable[[Array], Array],
    start: Array,
    step: Array,
    *,
    max_kl: Array | float,
    backtracks: int,
) -> LineSearchResult:
    """The longest of start + step, start + step/2, start + step/4, ... with a lower loss and a KL of at most `max_kl`.

    `backtracks` lengths are tried; if none satisfies both, the result is `start`, not accepted. `local_kl` is summed
    over devices here; `loss` must already be a sum over devices.
    """
    loss_before = loss(start)

    def try_step(best: LineSearchResult, scale: Array) -> tuple[LineSearchResult, None]:
        candidate = start + scale * step
        kl = collectives.psum(local_kl(candidate))
        accept = ~best.accepted & (loss(candidate) < loss_before) & (kl <= max_kl)
        best = LineSearchResult(
            jnp.where(accept, candidate, best.params), jnp.where(accept, kl, best.kl), best.accepted | accept
        )
        return best, None

    nothing_found = LineSearchResult(start, jnp.zeros_like(loss_before), jnp.zeros((), bool))
    return lax.scan(try_step, nothing_found, 0.5 ** jnp.arange(backtracks, dtype=start.dtype))[0]


def _critic_objective(objective: Objective, value_loss: Loss) -> Objective:
    """The objective of the critic alone, with the policy's parameters as constants: a critic may share its torso."""

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        return value_loss(params._replace(policy=lax.stop_gradient(params.policy)), batch)

    return objective._replace(policy_loss=loss, value_loss=None, noise=None)


def conjugate_gradient(matvec: Callable[[Array], Array], b: Array, steps: int) -> Array:
    """`steps` of conjugate gradients on A x = b from x = 0, A symmetric positive definite (Hestenes and Stiefel 1952).

    `matvec(v)` is A v for vectors `[n]`. x stops moving once |b - A x| <= 84 eps |b|, with eps the machine precision of
    `b`, so that extra steps do no harm: at 1e-5 in float32, and at 2e-14 in float64. It is solved for b over its
    largest number, whose squares neither vanish nor overflow.
    """
    scale = jnp.abs(b).max()
    b = b / jnp.where(scale > 0, scale, 1.0)
    tolerance = (84 * float(jnp.finfo(b.dtype).eps)) ** 2  # of the squared residual

    def step(carry: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        x, residual, direction, norm = carry
        product = matvec(direction)
        curvature = direction @ product
        moving = (norm > tolerance * (b @ b)) & (curvature > 0)
        alpha = jnp.where(moving, norm / jnp.where(moving, curvature, 1.0), 0.0)
        x, residual = x + alpha * direction, residual - alpha * product
        new_norm = residual @ residual
        beta = jnp.where(moving, new_norm / jnp.where(moving, norm, 1.0), 0.0)
        return (x, residual, jnp.where(moving, residual + beta * direction, direction), new_norm), None

    (x, *_), _ = lax.scan(step, (jnp.zeros_like(b), b, b, b @ b), None, steps)
    return x * scale

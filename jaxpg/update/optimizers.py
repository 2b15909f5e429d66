"""Optimizers and step-size schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg.errors import UserError
from jaxpg.types import Array, Params, Tree

TRIED_STEPS = 1_000
"""At most this many updates of an optimizer are tried to find one that is not 0."""
FLAT_BELOW = 2**20
"""Parameters from which on the optimizer updates array by array instead of as one vector."""


def adam(
    *, max_grad_norm: Array | float | None, eps: Array | float = 1e-5, flat_below: int | None = None
) -> optax.GradientTransformation:
    """Adam without a learning rate, after clipping the gradient by its global norm where `max_grad_norm` is given.

    Source: Kingma and Ba 2015; eps = 1e-5 is detail 3 of the 37 of PPO (Huang et al. 2022). Small trees are updated as
    one vector: `flat_if_small`.
    """
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return flat_if_small(optax.chain(clip, optax.scale_by_adam(eps=eps)), flat_below)


def flat_if_small(optimizer: optax.GradientTransformation, below: int | None = None) -> optax.GradientTransformation:
    """The optimizer, applied to one vector of all parameters if they are fewer than `below`, by default FLAT_BELOW.

    Replaces a handful of operations per array by a handful per update: fewer calls on a CPU and less to compile. From
    FLAT_BELOW numbers on, copying them costs more than it saves, and devices that share the parameters hold parts of
    single arrays (benchmarks/LOG.md). Where batches are small, it costs more than it saves much earlier.
    """
    flat = optax.flatten(optimizer)

    def chosen(tree: Tree) -> optax.GradientTransformation:
        limit = FLAT_BELOW if below is None else below
        return flat if sum(x.size for x in jax.tree.leaves(tree)) < limit else optimizer

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        return chosen(updates).update(updates, state, params)

    return optax.GradientTransformation(lambda params: chosen(params).init(params), update)


def checked_optimizer(
    make: Callable[[], optax.GradientTransformation], params: Callable[[], Tree] | None = None
) -> optax.GradientTransformation:
    """The optimizer of an algorithm; one that is not jaxpg's own is tried. For `params` see `check_uphill`.

    Raises:
        UserError: as `check_uphill`.
    """
    optimizer = make()
    maker = getattr(make, "func", make)
    if not getattr(maker, "__module__", "").startswith("jaxpg."):  # trying one compiles a dozen small programs
        check_uphill(optimizer, "The optimizer of this algorithm", params)
    return optimizer


def check_uphill(optimizer: optax.GradientTransformation, what: str, params: Callable[[], Tree] | None = None) -> None:
    """Try an optimizer on one gradient, if that depends on nothing that is traced.

    One whose labels or masks are a tree of the parameters themselves is tried on such a tree of small arrays:
    `params()` has its structure, and numbers of axes. Where its updates begin with 0, as in a warm-up or where
    gradients are accumulated, the same gradient is given again, up to TRIED_STEPS times.

    Raises:
        UserError: its updates of the policy or of the critic point against the gradient, as those of `optax.adam` do;
            it needs more than a gradient, its state and the parameters.
    """
    with jax.ensure_compile_time_eval():
        gradient: Tree = Params(jnp.ones(3), jnp.ones(3))
        updates = _first_updates(optimizer, gradient)
        if updates is None and params is not None:
            gradient = jax.tree.map(lambda x: jnp.ones([min(n, 2) for n in x.shape]), jax.eval_shape(params))
            updates = _first_updates(optimizer, gradient)
        uphill = [x.sum() for x in jax.tree.leaves(updates)]
        if any(isinstance(x, jax.core.Tracer) for x in uphill):
            return
        if uphill and not any(uphill):
            uphill = [x.sum() for x in jax.tree.leaves(_later_updates(optimizer, gradient))]
        if min(uphill, default=0) >= 0:
            return
    raise UserError(
        f"{what} returns updates that include the sign. jaxpg applies sign and step size itself: use one without them, "
        "such as optax:scale_by_adam in place of optax:adam, or turn it around, as in optax.chain(optax.adamw(1.0), "
        "optax.scale(-1.0))."
    )


def _first_updates(optimizer: optax.GradientTransformation, gradient: Tree) -> Tree | None:
    """What an optimizer makes of a first gradient; None if it is for other parameters.

    Raises:
        UserError: it needs more than a gradient, its state and the parameters, as `reduce_on_plateau` needs the loss.
    """
    try:
        return optimizer.update(gradient, optimizer.init(gradient), gradient)[0]
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if "required keyword-only argument" in str(error):
            raise UserError(
                f"The optimizer of an algorithm gets gradient, state and parameters, and this one wants more: {error}."
            ) from error
        return None


def _later_updates(optimizer: optax.GradientTransformation, gradient: Tree) -> Tree:
    """The first updates that are not all 0, of the same gradient again and again; 0 after TRIED_STEPS of them."""

    def are_zero(carry: tuple[Array, Tree, Tree]) -> Array:
        step, _, updates = carry
        return (step < TRIED_STEPS) & ~jnp.stack([(x != 0).any() for x in jax.tree.leaves(updates)]).any()

    def update(carry: tuple[Array, Tree, Tree]) -> tuple[Array, Tree, Tree]:
        step, state, _ = carry
        updates, state = optimizer.update(gradient, state, gradient)
        return step + 1, state, updates

    start = jnp.zeros((), jnp.int32), optimizer.init(gradient), jax.tree.map(jnp.zeros_like, gradient)
    return lax.while_loop(are_zero, update, start)[2]


def gradient_norms(gradient: Tree, opt_state: Tree) -> dict[str, Array]:
    """`gradient_norm`, of all numbers of a gradient; of Params with a critic also those of the two networks.

    `policy_gradient_norm` and `value_gradient_norm` are the norms of `gradient.policy` and `gradient.critic`; a torso
    that both share belongs to the policy.
    """
    if not isinstance(gradient, Params) or not jax.tree.leaves(gradient.critic):
        return {"gradient_norm": _norm(gradient, opt_state)}
    if _is_flat(opt_state):
        # Of the vector that the optimizer has made, with zeros for the other network, and not of slices: sums over one
        # vector, with that of the clipping, are one kernel on a GPU. The policy's numbers come first.
        vector = ravel_pytree(gradient)[0]
        of_policy = jnp.arange(vector.size) < sum(x.size for x in jax.tree.leaves(gradient.policy))
        policy, value = (jnp.linalg.norm(jnp.where(chosen, vector, 0)) for chosen in (of_policy, ~of_policy))
    else:
        policy, value = optax.tree.norm(gradient.policy), optax.tree.norm(gradient.critic)
    return {
        "gradient_norm": jnp.hypot(policy, value),
        "policy_gradient_norm": policy,
        "value_gradient_norm": value,
    }


def _norm(gradient: Tree, opt_state: Tree) -> Array:
    """The norm of all numbers of a gradient, as one vector where the optimizer's state consists of vectors.

    It replaces `optax.tree.norm`, which adds up array by array, where `flat_if_small` has made that vector anyway.
    Elsewhere a vector made for the norm alone takes ten times as long as the whole gradient step of DQN on a CPU
    (benchmarks/LOG.md, "DQN with a convolution").
    """
    return jnp.linalg.norm(ravel_pytree(gradient)[0]) if _is_flat(opt_state) else optax.tree.norm(gradient)


def _is_flat(opt_state: Tree) -> bool:
    arrays = jax.tree.leaves(opt_state)  # plain gradient descent has none
    return bool(arrays) and all(x.ndim <= 1 for x in arrays)


def sgd(*, max_grad_norm: Array | float | None = None) -> optax.GradientTransformation:
    """The gradient itself, clipped by its global norm where `max_grad_norm` is given."""
    return optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)


def constant(steps: Array, *, value: Array | float) -> Array:
    """The step size `value` at all times."""
    return jnp.asarray(value, jnp.float32)


def linear_decay(steps: Array, *, value: Array | float, over: int) -> Array:
    """`value` max(1 - steps / over, 0), `steps` and `over` in environment steps (detail 4 of the 37 of PPO)."""
    return value * jnp.maximum(1 - steps / over, 0.0)


def annealed(value: Array | float, over: int | None) -> Callable[[Array], Array]:
    """`linear_decay` of `value` over this many environment steps, or `constant` where `over` is None."""
    return partial(constant, value=value) if over is None else partial(linear_decay, value=value, over=over)

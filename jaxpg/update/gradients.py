"""From a loss to new parameters: a gradient step, epochs of minibatches, or a natural-gradient step in a trust region.

All three share one signature, `update(objective, optimizer, learning_rate, params, opt_state, batch, key)`, and return
`params, opt_state, metrics`. Losses are sums over the steps of this device of weight times loss; gradients and metrics
are summed over devices here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg.parallel import collectives
from jaxpg.types import Array, Key, Metrics, Params, Tree
from jaxpg.update.batching import (
    nth_chunk,
)
from jaxpg.update.objective import Batch, Objective


def gradient_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
) -> tuple[Params, Tree, Metrics]:
    """One step along the gradient of the loss over the whole batch."""
    gradient, metrics = summed_gradient(objective.loss, params, objective.as_minibatch(batch))
    params, opt_state, norm = apply_gradient(optimizer, learning_rate, gradient, params, opt_state)
    return params, opt_state, {**metrics, "gradient_norm": norm}


def summed_gradient(
    loss: Callable[[Any, Any], tuple[Array, Metrics]],
    params: Tree,
    batch: Tree,
    chunks: int = 1,
    part: Callable[[Any, Array | int, int], Any] = nth_chunk,
) -> tuple[Tree, Metrics]:
    """The gradient of a loss and its additive metrics, summed over all devices.

    Summed also over `chunks` parts of the batch, taken one after the other, `part(batch, i, chunks)` being the i-th of
    them. Since the loss is a sum, the result is the same, and only what one part needs must be held at a time.
    """
    differentiate = _vmap_of_one(jax.grad(loss, has_aux=True))
    if chunks == 1:
        return collectives.psum(differentiate(params, batch))

    @jax.jit  # traced once, for its shapes and for its code
    def of_chunk(i: Array) -> tuple[Tree, Metrics]:
        return differentiate(params, part(batch, i, chunks))

    def add(total: tuple[Tree, Metrics], i: Array) -> tuple[tuple[Tree, Metrics], None]:
        return jax.tree.map(jnp.add, total, of_chunk(i)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_chunk, jnp.zeros((), jnp.int32)))
    return collectives.psum(lax.scan(add, zeros, jnp.arange(chunks))[0])


def _vmap_of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function through a `vmap` over an axis of length one.

    It changes nothing but how XLA lays out the products: of a weight gradient it then transposes the factors in memory
    first, which on a CPU is worth 29% of a whole PPO loop (benchmarks/LOG.md).
    """

    def lifted(*arguments: Any) -> Any:
        stacked = jax.tree.map(lambda x: x[None], arguments)
        return jax.tree.map(lambda x: x[0], jax.vmap(function)(*stacked))

    return lifted


def apply_gradient(
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    gradient: Tree,
    params: Tree,
    opt_state: Tree,
) -> tuple[Any, Tree, Array]:
    """One step of the optimizer, whose updates point uphill; also the norm of the gradient."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
    return params, opt_state, jnp.linalg.norm(ravel_pytree(gradient)[0])

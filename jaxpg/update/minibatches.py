"""Epochs of minibatches: shuffled, cut into chunks, each a step of the optimizer, with an early stop by KL."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpg.parallel import collectives
from jaxpg.types import Array, Episodes, Key, Metrics, Params, Tree
from jaxpg.update.batching import (
    CPU_CHUNK_ROWS,
    gather_words,
    gathered_chunk,
    map_batch_columns,
    num_chunks,
    pack_vectors,
    take_columns,
)
from jaxpg.update.gradients import apply_gradient, summed_gradient
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.shuffle import random_permutations


def minibatch_epochs(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
    *,
    epochs: int,
    num_minibatches: int,
    target_kl: Array | float | None = None,
    chunk_rows: int | None = None,
) -> tuple[Params, Tree, Metrics]:
    """`epochs` passes over the batch, each in a fresh order and cut into `num_minibatches` gradient steps.

    Minibatches are cut from single steps, or from whole columns where the policy reads columns. Weights are scaled by
    the number of minibatches, so that each loss estimates that of the whole batch. With `target_kl`, no further step
    is taken once the approximate KL (k3) of a minibatch to the collecting policy exceeds 1.5 times it (the early stop
    of OpenAI's Spinning Up and of Stable-Baselines3). A minibatch's gradient is summed over chunks of at most
    `chunk_rows` rows (columns): exact, and faster where a chunk fits a cache that the minibatch does not. Not given, it
    is what suits the machine: CPU_CHUNK_ROWS on a CPU, the whole minibatch elsewhere.
    """
    if chunk_rows is None and jax.default_backend() == "cpu":
        chunk_rows = CPU_CHUNK_ROWS
    batch = batch if objective.needs_trajectories else _as_steps(batch)
    num_columns = batch.weight.shape[1]
    batch = batch._replace(weight=batch.weight * num_minibatches)
    # Drawn here, in one call: random-number code is a large part of what there is to compile.
    orders = random_permutations(collectives.device_key(key), epochs, num_columns).reshape(epochs * num_minibatches, -1)
    chunks = num_chunks(orders.shape[1], chunk_rows)
    gather = (
        gather_words(batch) if chunks == 1 else lambda columns: map_batch_columns(batch, partial(take_columns, columns))
    )
    packed, unpacked = pack_vectors(params)

    def minibatch(carry: tuple[Tree, Tree, Array], columns: Array) -> tuple[tuple[Tree, Tree, Array], Metrics]:
        params, opt_state, going = unpacked(carry[0]), *carry[1:]
        chosen = objective.as_minibatch(gather(columns))
        part = partial(gathered_chunk, batch._replace(minibatch_weight=chosen.minibatch_weight), columns)
        gradient, metrics = summed_gradient(objective.loss, params, chosen, chunks, part)
        if target_kl is not None:
            going = going & (metrics["approx_kl"] <= 1.5 * target_kl)
        new_params, new_opt_state, norm = apply_gradient(optimizer, learning_rate, gradient, params, opt_state)
        if target_kl is not None:
            keep = partial(jnp.where, going)
            new_params = jax.tree.map(keep, new_params, params)
            new_opt_state = jax.tree.map(keep, new_opt_state, opt_state)
        metrics = {**metrics, "gradient_norm": norm, "updates": going.astype(norm.dtype)}
        return (packed(new_params), new_opt_state, going), metrics

    carry = (packed(params), opt_state, jnp.ones((), bool))
    (carried, opt_state, _), metrics = lax.scan(minibatch, carry, orders)
    taken = metrics.pop("updates")
    return unpacked(carried), opt_state, {**jax.tree.map(jnp.mean, metrics), "updates": taken.sum()}


def _as_steps(batch: Batch) -> Batch:
    """`[T, B, ...]` as `[1, T*B, ...]`: for a policy without memory every step is a column of its own."""
    rollout = batch.rollout._replace(final_obs=(), episodes=Episodes())
    return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch._replace(rollout=rollout))

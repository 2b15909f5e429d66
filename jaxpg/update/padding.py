"""Gradients of whole episodes of unequal length: only steps that train are worked through, padding is not.

An episodic rollout has as many rows as the time limit, however short its episodes are (20 of 500 when CartPole begins).
The steps that train are numbered first. Minibatches are cut from them in equal shares, and a minibatch is worked
through in chunks, as many as hold any of its steps. Since the loss is a sum over steps in which padding weighs
nothing, the gradient is the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Episodes, Key, Tree
from jaxpg.update.batching import Minibatches, columns_of, merge, partition
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.shuffle import random_permutations_below
from jaxpg.vectorize import count_chunks, largest_in_batch

NOTHING = -1  # a place of a minibatch that holds no step
MINIBATCH_FIELDS = ("advantage", "weight", "minibatch_weight", "noise")


def skips_padding(objective: Objective, num_steps: int, num_minibatches: int = 1) -> bool:
    """Whether an update of `num_steps` steps, padding included, gains from skipping those that do not train."""
    rows = machine().chunk_padded
    return objective.padded and not objective.needs_trajectories and num_steps // num_minibatches > rows


def steps_of_chunk(num_steps: int, chunk_rows: int | None = None) -> int:
    """The steps per chunk of a minibatch of `num_steps`: at most `chunk_rows`, by default `Machine.chunk_padded`."""
    return num_steps // count_chunks(num_steps, chunk_rows or machine().chunk_padded)


def as_single_steps(batch: Batch) -> Batch:
    """`[T, B, ...]` as `[1, T*B, ...]`: for a policy without memory every step is a separate column."""
    rollout = batch.rollout._replace(final_obs=(), episodes=Episodes())
    return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch._replace(rollout=rollout))


def training_steps_first(batch: Batch) -> tuple[Array, Array]:
    """`[n]` int32, the numbers of the columns of a batch of single steps, those that train before the others; [] count.

    Both are in their order. A step trains where the loss mask is not 0.
    """
    trains = batch.rollout.loss_mask[0] > 0
    count = trains.sum(dtype=jnp.int32)
    place = jnp.where(trains, jnp.cumsum(trains), count + jnp.cumsum(~trains)) - 1
    numbers = jnp.arange(len(trains), dtype=jnp.int32)
    return jnp.zeros_like(numbers).at[place].set(numbers, unique_indices=True), count


def all_at_once(batch: Batch) -> Array:
    """`[n]` int32: the columns of the batch that train, in order, and NOTHING from there on."""
    order, count = training_steps_first(batch)
    return jnp.where(jnp.arange(len(order)) < count, order, NOTHING)


def shuffled_shares(key: Key, batch: Batch, epochs: int, num_minibatches: int) -> Array:
    """`[epochs * num_minibatches, n / num_minibatches]` int32: the columns of every minibatch, then NOTHING.

    Every epoch is a random order of the steps that train, in shares that differ by one step at most. n, padding
    included, must be a multiple of `num_minibatches`.
    """
    order, count = training_steps_first(batch)
    size = len(order) // num_minibatches
    edges = jnp.arange(num_minibatches + 1)
    edges = edges * (count // num_minibatches) + jnp.minimum(edges, count % num_minibatches)

    def share(permutation: Array, begin: Array, end: Array) -> Array:
        places = jax.lax.dynamic_slice_in_dim(permutation, begin, size)
        return jnp.where(jnp.arange(size) < end - begin, order[places], NOTHING)

    def shares(permutation: Array) -> Array:
        return jax.vmap(partial(share, permutation))(edges[:-1], edges[1:])

    permutations = random_permutations_below(key, epochs, len(order), count)
    return jax.vmap(shares)(permutations).reshape(epochs * num_minibatches, size)


def cut_padded(batch: Batch, size: int) -> Minibatches:
    """Minibatches of the steps that train, in chunks of `size` steps.

    What depends on a whole minibatch, weights, advantages and the mask, is gathered for all of it; the rest chunk by
    chunk.
    """
    whole = _fields_of_minibatch(batch)
    early, late = partition(batch, whole)

    def take(columns: Array) -> Batch:
        minibatch = columns_of(columns, early)
        trains = (columns != NOTHING).astype(batch.weight.dtype)[None]
        weights = jax.tree.map(lambda x: x * trains, (minibatch.weight, minibatch.minibatch_weight))
        loss_mask = minibatch.rollout.loss_mask * trains
        rollout = minibatch.rollout._replace(loss_mask=loss_mask)
        return minibatch._replace(weight=weights[0], minibatch_weight=weights[1], rollout=rollout)

    def chunk(columns: Array, minibatch: Batch, i: Array | int, num_chunks: Array | int) -> Batch:
        def rows(axis: int, x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)

        rest: Any = columns_of(rows(0, columns), late)
        return merge(rest._replace(**dict.fromkeys(MINIBATCH_FIELDS)), minibatch.map_columns(rows))

    def num_chunks(columns: Array) -> Array:
        return largest_in_batch(-(-(columns != NOTHING).sum(dtype=jnp.int32) // size))  # more than needed weigh nothing

    return Minibatches(num_chunks, take, chunk)


def _fields_of_minibatch(batch: Batch) -> Tree:
    """A batch of booleans: what `Objective.as_minibatch` reads or writes, and the mask."""
    nothing = jax.tree.map(lambda x: False, batch)
    chosen = {name: jax.tree.map(lambda x: True, getattr(batch, name)) for name in MINIBATCH_FIELDS}
    return nothing._replace(rollout=nothing.rollout._replace(loss_mask=True), **chosen)

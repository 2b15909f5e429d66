"""Gradients of whole episodes of unequal length: only steps that train are worked through, padding is not.

An episodic rollout has as many rows as the time limit, however short its episodes are (20 of 500 when CartPole begins).
The steps that train are numbered first. Minibatches are cut from them in equal shares, and a minibatch is worked
through in chunks, as many as hold any of its steps. Since the loss is a sum over steps in which padding weighs
nothing, the gradient is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


class _Pieces(NamedTuple):
    """Equal pieces of the slots of a batch, `num` of them, which may go beyond its end."""

    num: int
    size: int


def _pieces(num_slots: int) -> _Pieces:
    """Pieces of at most `Machine.slots_at_once` slots."""
    num = math.ceil(num_slots / machine().slots_at_once)
    return _Pieces(num, math.ceil(num_slots / num))


def _work_through(pieces: _Pieces, end: Array, work: Callable[[Array, Tree], Tree], carried: Tree) -> Any:
    """`carried <- work(slots, carried)` for the numbers of a piece's slots, `[size]` int32, one piece after the other.

    Pieces are left out from the slot `end` on, where nothing is to be done.
    """

    def piece(i: Array | int, carried: Tree) -> Tree:
        return work(i * pieces.size + jnp.arange(pieces.size, dtype=jnp.int32), carried)

    if pieces.num == 1:
        return piece(0, carried)
    return lax.fori_loop(jnp.zeros((), jnp.int32), largest_in_batch(-(-end // pieces.size)), piece, carried)


def training_steps_first(batch: Batch) -> tuple[Array, Array]:
    """`[n]` int32, the numbers of the columns of a batch of single steps that train, in order, then NOTHING; [] count.

    A step trains where the loss mask is not 0.
    """
    trains = batch.rollout.loss_mask[0] > 0
    pieces, n = _pieces(len(trains)), len(trains)
    end = jnp.where(trains, jnp.arange(1, n + 1, dtype=jnp.int32), 0).max()
    trains = jnp.pad(trains, (0, pieces.num * pieces.size - n))

    def number(slots: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        order, count = found
        train = lax.dynamic_slice_in_dim(trains, slots[0], pieces.size)
        place = jnp.where(train, count + jnp.cumsum(train) - 1, n + slots)  # from n on nothing is stored
        order = order.at[place].set(slots, mode="drop", unique_indices=True)
        return order, count + train.sum(dtype=jnp.int32)

    return _work_through(pieces, end, number, (jnp.full(n, NOTHING, jnp.int32), jnp.zeros((), jnp.int32)))


def shuffled_shares(key: Key, batch: Batch, epochs: int, num_minibatches: int) -> Array:
    """`[epochs * num_minibatches, n / num_minibatches]` int32: the columns of every minibatch, then NOTHING.

    Every epoch is a random order of the steps that train, in shares that differ by one step at most. n, padding
    included, must be a multiple of `num_minibatches`.
    """
    order, count = training_steps_first(batch)
    pieces, places = _pieces(len(order)), random_permutations_below(key, epochs, count)

    def shuffle(slots: Array, shuffled: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(shuffled, order[places(slots)], slots[0], axis=1)

    shuffled = _work_through(pieces, count, shuffle, jnp.zeros((epochs, pieces.num * pieces.size), jnp.int32))
    size = len(order) // num_minibatches
    edges = jnp.arange(num_minibatches + 1)
    edges = edges * (count // num_minibatches) + jnp.minimum(edges, count % num_minibatches)

    def share(of_epoch: Array, begin: Array, end: Array) -> Array:
        columns = lax.dynamic_slice_in_dim(of_epoch, begin, size)
        return jnp.where(jnp.arange(size) < end - begin, columns, NOTHING)

    def shares(of_epoch: Array) -> Array:
        return jax.vmap(partial(share, of_epoch))(edges[:-1], edges[1:])

    return jax.vmap(shares)(shuffled).reshape(epochs * num_minibatches, size)


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
            return lax.dynamic_slice_in_dim(x, i * size, size, axis)

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

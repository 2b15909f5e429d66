"""Prioritised replay: steps are drawn in proportion to a power of their last TD error.

Source: Schaul et al. 2016 (Prioritized Experience Replay), the proportional variant, section 3.3. Steps compete with
those of their own environment, since every environment has equally many rows in a batch (replay.py).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpg.parallel import collectives
from jaxpg.types import Array, Scalar
from jaxpg.values.replay import BatchNoise, Drawn, Sampling, Window, batch_noise

BLOCK = 64  # entries per block: a draw searches the sums of blocks, then the entries of one
SMALLEST_ERROR = 1e-6  # added to |TD error|, so that every step can be drawn again


class Priorities(NamedTuple):
    """Two levels of a sum over each ring, in place of a tree of many.

    entries: [B, blocks, BLOCK], the priorities |TD error|^alpha of all slots in order, 0 where a step cannot be drawn.
    sums: [B, blocks], of the entries of each block.
    highest: [B], the highest priority so far, which new steps get.
    """

    entries: Array
    sums: Array
    highest: Array


def prioritized(*, alpha: Scalar, beta: Scalar, over: int) -> Sampling:
    """P(i) = p_i / sum_k p_k with p = (|TD error| + 1e-6)^alpha, and weights (S P(i))^-beta over their maximum.

    The sum, and S, the number of steps that can be drawn, are of the ring of one environment; the maximum is that of
    the batch. New steps have the highest priority so far. `beta` rises linearly to 1
    over the first `over` environment steps (section 3.4 and algorithm 1).
    """
    return Sampling(
        init=_init,
        add=_add,
        noise=partial(batch_noise, jax.random.uniform),
        draw=partial(_draw, beta=beta, over=over),
        update=partial(_update, alpha=alpha),
    )


def _init(num_columns: int, slots: int) -> Priorities:
    blocks = -(-slots // BLOCK)
    entries = jnp.zeros((num_columns, blocks, BLOCK), jnp.float32)
    return Priorities(entries, entries.sum(-1), jnp.ones(num_columns, jnp.float32))


def _set(state: Priorities, column: Array, slot: Array, priority: Array) -> Priorities:
    """New priorities of some slots; sums are taken anew from their entries, so that no rounding accumulates."""
    block = slot // BLOCK
    entries = state.entries.at[column, block, slot % BLOCK].set(priority)
    return state._replace(entries=entries, sums=state.sums.at[column, block].set(entries[column, block].sum(-1)))


def _add(state: Priorities, window: Window, rows: int, n: int) -> Priorities:
    """The newest n - 1 steps have priority 0; those that can be drawn from now on have the highest."""
    age = jnp.arange(rows + n - 1)[None] + 1  # 1 for the newest
    slot = (window.cursor - age) % window.slots
    complete = (age >= n) & (age <= window.filled)
    column = jnp.arange(window.columns)[:, None]
    priority = jnp.where(complete, state.highest[:, None], 0.0)
    column, slot, priority = (jnp.broadcast_to(x, (window.columns, age.size)) for x in (column, slot, priority))
    return _set(state, column, slot, priority)


def _draw(
    state: Priorities,
    window: Window,
    n: int,
    steps: Array,
    noise: BatchNoise,
    *,
    beta: Scalar,
    over: int,
) -> Drawn:
    column = noise.column
    sums = state.sums[column]
    threshold = noise.number * sums.sum(-1)
    block, before = _search(sums, threshold)
    entries = state.entries[column, block]
    place, _ = _search(entries, threshold - before)
    priority = jnp.take_along_axis(entries, place[:, None], 1)[:, 0]
    probability = priority / sums.sum(-1)
    exponent = beta + (1 - beta) * jnp.minimum(steps / over, 1.0)
    weight = (window.starts(n) * probability) ** -exponent
    return Drawn(column, block * BLOCK + place, weight / collectives.maximum(weight))


def _search(weights: Array, threshold: Array) -> tuple[Array, Array]:
    """For each row of weights `[R, K]` the first entry at which the cumulative sum exceeds `threshold` `[R]`.

    Also the sum before it. An entry of weight 0 is never chosen, whatever the rounding: where no sum exceeds the
    threshold it is the last entry of positive weight.
    """
    cumulative = jnp.cumsum(weights, -1)
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None]
    index = jnp.broadcast_to(index, weights.shape)
    above = (cumulative > threshold[:, None]) & (weights > 0)
    last_positive = jnp.where(weights > 0, index, 0).max(-1)
    found = jnp.minimum(jnp.where(above, index, weights.shape[-1]).min(-1), last_positive)
    return found, jnp.take_along_axis(cumulative - weights, found[:, None], 1)[:, 0]


def _update(state: Priorities, drawn: Drawn, td_error: Array, where: Array, *, alpha: Scalar) -> Priorities:
    """The priorities of the rows that were drawn, by their new errors."""
    old = state.entries[drawn.column, drawn.slot // BLOCK, drawn.slot % BLOCK]
    priority = jnp.where(where, (jnp.abs(td_error) + SMALLEST_ERROR) ** alpha, old)
    return _set(state, drawn.column, drawn.slot, priority)._replace(
        highest=state.highest.at[drawn.column].max(priority)
    )

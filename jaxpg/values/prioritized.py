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

BLOCK = 64  # entries per block: a draw searches one block of every level
SMALLEST_ERROR = 1e-6  # added to |TD error|, so that every step can be drawn again


class Priorities(NamedTuple):
    """A tree of sums over each ring, with BLOCK children where others have two: few levels, so few kernels.

    levels: [B, blocks, BLOCK] each. Those of the first are the priorities |TD error|^alpha of all slots in order, 0
        where a step cannot be drawn; those of the next are the sums of its blocks in order; the last is one block.
    highest: [B], the highest priority so far, which new steps get.
    """

    levels: tuple[Array, ...]
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
    blocks = [-(-slots // BLOCK)]
    while blocks[-1] > 1:
        blocks.append(-(-blocks[-1] // BLOCK))
    levels = tuple(jnp.zeros((num_columns, number, BLOCK), jnp.float32) for number in blocks)
    return Priorities(levels, jnp.ones(num_columns, jnp.float32))


def _set(state: Priorities, column: Array, slot: Array, priority: Array) -> Priorities:
    """New priorities of some slots; sums are recomputed from their entries, so that no rounding accumulates."""
    levels, index, value = [], slot, priority
    for level in state.levels:
        block = index // BLOCK
        level = level.at[column, block, index % BLOCK].set(value)
        levels.append(level)
        index, value = block, level[column, block].sum(-1)
    return state._replace(levels=tuple(levels))


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
    total = state.levels[-1][column, 0].sum(-1)
    threshold, index = noise.number * total, jnp.zeros_like(column)
    for level in reversed(state.levels):
        entries = level[column, index]
        place, before = _search(entries, threshold)
        threshold, index = threshold - before, index * BLOCK + place
    probability = jnp.take_along_axis(entries, place[:, None], 1)[:, 0] / total
    exponent = beta + (1 - beta) * jnp.minimum(steps / over, 1.0)
    weight = (window.starts(n) * probability) ** -exponent
    return Drawn(column, index, weight / collectives.maximum(weight))


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
    old = state.levels[0][drawn.column, drawn.slot // BLOCK, drawn.slot % BLOCK]
    priority = jnp.where(where, (jnp.abs(td_error) + SMALLEST_ERROR) ** alpha, old)
    return _set(state, drawn.column, drawn.slot, priority)._replace(
        highest=state.highest.at[drawn.column].max(priority)
    )

"""Replay buffers on the device: a ring of slots per environment, and drawing rows from it uniformly.

A buffer is a pytree of arrays `[B, slots, ...]`. All B environments write the same slot at the same time, so one cursor
serves them all, and it follows from the number of steps taken. All environments have equally many rows in a batch
(within one): a batch is stratified over environments, so it does not depend on how these are split over devices.

Flashbax 0.1.3 has such buffers too, works with jax 0.10.2, and was measured beside this one (benchmarks/LOG.md, "a
replay buffer"). Its trajectory buffers lose the successor of a time-out to the reset, and its batches depend on how
environments are split over devices, so this ring is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.rollout.successors import successor_obs
from jaxpg.types import Array, Key, Rollout, Scalar, Tree


class StoredSteps(NamedTuple):
    """Steps of experience, leaves `[B, slots, ...]`.

    next_obs: the true successor of `obs`, also where the episode timed out; meaningless where it terminated.
    Other fields are those of Transition.
    """

    obs: Tree
    action: Array
    reward: Array
    discount: Array
    last: Array
    next_obs: Tree


class Window(NamedTuple):
    """Which slots of the rings hold steps.

    cursor: [] int32, where the next step will be written.
    filled: [] int32, slots in use.
    columns, slots: environments of this device, and slots of each (static).
    """

    cursor: Array
    filled: Array
    columns: int
    slots: int

    def starts(self, n: int) -> Array:
        """[] int32, slots from which n successive steps are stored; at least 1."""
        return jnp.maximum(self.filled - (n - 1), 1)


class Drawn(NamedTuple):
    """The rows of a batch on this device, `[R]` each.

    column, slot: where the row is.
    weight: importance weight, 1 where all steps are equally likely.
    """

    column: Array
    slot: Array
    weight: Array


class BatchNoise(NamedTuple):
    """The random numbers of a batch on this device, `[R]` each.

    column: int32, the environment of the row.
    number: what its slot is drawn from.
    """

    column: Array
    number: Array


class Sampling(NamedTuple):
    """How the rows of a batch are drawn.

    init(num_columns, slots) -> state: leaves `[B, ...]`, `()` where nothing is kept.
    add(state, window, rows, n) -> state: after `rows` new steps of every environment; `window` is that after them. The
        newest n - 1 steps cannot be drawn, since what follows them is not known yet.
    noise(num_columns, batch_size, key) -> BatchNoise: of a batch of `batch_size` rows over all devices.
    draw(state, window, n, steps, noise) -> Drawn: that batch; `steps` is the number of environment steps so far.
    update(state, drawn, td_error, where) -> state: with the TD errors `[R]` of the rows that were drawn, if `where`.
    """

    init: Callable[[int, int], Tree]
    add: Callable[[Tree, Window, int, int], Tree]
    noise: Callable[[int, int, Key], BatchNoise]
    draw: Callable[[Tree, Window, int, Array, BatchNoise], Drawn]
    update: Callable[[Tree, Drawn, Array, Array], Tree]


def stored_steps(rollout: Rollout) -> StoredSteps:
    """The steps of a rollout as a buffer stores them, `[B, T, ...]`."""
    steps = rollout.steps
    stored = StoredSteps(steps.obs, steps.action, steps.reward, steps.discount, steps.last, successor_obs(rollout))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), stored)


def empty(like: StoredSteps, slots: int) -> StoredSteps:
    """Rings of `slots` zeros for rows `[B, T, ...]` like these."""
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], slots, *x.shape[2:]), x.dtype), like)


def write(buffer: StoredSteps, rows: StoredSteps, cursor: Array) -> StoredSteps:
    """The rings with rows `[B, T, ...]` from slot `cursor` on, in place inside of a loop.

    Raises:
        UserError: T does not divide the slots, so that the last rows would not fit behind `cursor`.
    """
    steps, slots = rows.reward.shape[1], buffer.reward.shape[1]
    if slots % steps:
        raise UserError(f"A buffer of {slots} slots cannot be filled by {steps} steps at a time: make it a multiple.")
    return jax.tree.map(lambda ring, new: lax.dynamic_update_slice_in_dim(ring, new, cursor, 1), buffer, rows)


def window(buffer: StoredSteps, vector_steps: Array) -> Window:
    """The window after `vector_steps` steps of every environment."""
    columns, slots = buffer.reward.shape
    return Window(vector_steps % slots, jnp.minimum(vector_steps, slots), columns, slots)


class NStep(NamedTuple):
    """Transitions over up to n steps, `[R, ...]` each: what a target is made of.

    G = reward_sum + bootstrap_discount V(next_obs), with reward_sum = sum_{k < m} c_k r_{t+k} and bootstrap_discount =
    c_m, where c_k = prod_{j < k} gamma d_{t+j} and d is the discount of each step, 0 at a termination; m is n, or less
    where the episode ends first. Source: Sutton & Barto 2018, equation 7.1.
    """

    obs: Tree
    action: Array
    reward_sum: Array
    bootstrap_discount: Array
    next_obs: Tree


def gather(buffer: StoredSteps, drawn: Drawn, n: int, gamma: Scalar) -> NStep:
    """The n-step transitions that begin at the rows that were drawn. They end with their episode."""
    slots = buffer.reward.shape[1]

    def at(x: Array, slot: Array) -> Array:
        return x.at[drawn.column, slot].get(mode="promise_in_bounds")

    slot, end = drawn.slot, drawn.slot
    reward_sum, factor = jnp.zeros_like(drawn.weight), jnp.ones_like(drawn.weight)
    running = jnp.ones(slot.shape, bool)
    for k in range(n):
        if k:
            slot = jnp.where(slot + 1 == slots, 0, slot + 1)
            end = jnp.where(running, slot, end)
        reward_sum += jnp.where(running, factor * at(buffer.reward, slot), 0.0)
        factor = jnp.where(running, factor * gamma * at(buffer.discount, slot), factor)
        running &= ~at(buffer.last, slot)
    obs = jax.tree.map(lambda x: at(x, drawn.slot), buffer.obs)
    next_obs = jax.tree.map(lambda x: at(x, end), buffer.next_obs)
    return NStep(obs, at(buffer.action, drawn.slot), reward_sum, factor, next_obs)


def uniform() -> Sampling:
    """All steps are equally likely (Lin 1992; Mnih et al. 2015)."""
    noise = partial(batch_noise, partial(jax.random.bits, dtype=jnp.uint32))
    return Sampling(init=_nothing, add=_nothing, noise=noise, draw=_draw_uniform, update=_nothing)


def _nothing(*arguments: Any) -> tuple[()]:
    """Uniform sampling keeps no state."""
    return ()


def _draw_uniform(state: Tree, window: Window, n: int, steps: Array, noise: BatchNoise) -> Drawn:
    return Drawn(noise.column, _slot(window, noise.number, n), jnp.ones(noise.column.shape, jnp.float32))


def batch_noise(
    draw: Callable[[Key, tuple[int, ...]], Array], num_columns: int, batch_size: int, key: Key
) -> BatchNoise:
    """The random numbers of a batch; `draw(key, shape)` makes those of its slots, for the rows of all devices."""
    column_key, slot_key = jax.random.split(key)
    column = _draw_columns(column_key, num_columns, batch_size)
    return BatchNoise(column, _of_this_device(draw(slot_key, (batch_size,))))


def _draw_columns(key: Key, num_columns: int, batch_size: int) -> Array:
    """`[R]` int32, the environments of the rows of this device, equally many of each.

    Where the environments do not divide the batch, those with one row more than others are drawn at random.
    """
    rows = _rows_per_device(batch_size)
    row = jnp.arange(rows, dtype=jnp.int32)
    if rows % num_columns == 0:
        return row // (rows // num_columns)
    first = jax.random.randint(collectives.device_key(key), (), 0, num_columns, jnp.int32)
    return (first + row) % num_columns


def _slot(window: Window, bits: Array, n: int) -> Array:
    """`[R]` int32, a slot for every random word, from which n steps are stored.

    Once all slots are filled, the oldest step is where the next one will be written.
    """
    age = (bits % window.starts(n).astype(jnp.uint32)).astype(jnp.int32)
    oldest = jnp.where(window.filled == window.slots, window.cursor, 0)
    return (oldest + age) % window.slots


def _rows_per_device(batch_size: int) -> int:
    """Rows of a batch on this device.

    Raises:
        UserError: the devices do not divide the batch.
    """
    shards = collectives.num_shards()
    if batch_size % shards:
        raise UserError(f"batch_size = {batch_size} cannot be split evenly over {shards} devices.")
    return batch_size // shards


def _of_this_device(x: Array) -> Array:
    """The part of an array of one entry per row, `[batch_size]`, that belongs to this device."""
    rows = _rows_per_device(x.shape[0])
    return lax.dynamic_slice_in_dim(x, collectives.shard_index() * rows, rows)

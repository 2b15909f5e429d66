"""Gradients of texts of unequal length: texts are put side by side into rows, so padding is not worked through.

A rollout has as many rows as the longest completion may have, and its prompts as many slots as the longest of them.
The slots that matter, those of a prompt and of its completion up to the last token that trains, are laid one text after
the other into rows of the full length; a transformer attends within each text alone. A minibatch is worked through in
chunks of rows, as many as hold any text. Since the loss is a sum over steps in which all else weighs nothing, the
gradient is the same. Also known as sequence packing, or as a batch without padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Episodes, PackedTexts, Prompt
from jaxpg.update.batching import Minibatches
from jaxpg.update.objective import Batch, Objective
from jaxpg.update.padding import NOTHING, as_single_steps, cut_padded
from jaxpg.vectorize import largest_in_batch


def packs(objective: Objective, batch: Batch, num_minibatches: int = 1) -> bool:
    """Whether an update of this batch gains from packing its texts: a minibatch is more than one chunk of rows."""
    return objective.packs_texts and batch.weight.shape[1] // num_minibatches > _rows_of_chunk(_slots(batch))


def pack_texts(batch: Batch, columns: Array) -> Array:
    """`[R, S]` int32: the rows of a minibatch that has the texts of these columns, `[C]`.

    Of each slot `column * S + slot` where S is the length of a prompt and a completion, or NOTHING. R is C, rounded up
    to whole chunks; rows with no text are the last ones.
    """
    num_slots = _slots(batch)
    matters = _matters(batch)[columns]
    row, offset = assign_rows(matters.sum(-1), num_slots)
    size = _rows_of_chunk(num_slots)
    num_rows = -(-len(columns) // size) * size
    place = (row * num_slots + offset)[:, None] + jnp.cumsum(matters, -1) - 1
    places = jnp.where(matters, place, num_rows * num_slots)
    numbers = columns[:, None] * num_slots + jnp.arange(num_slots)[None]
    rows = jnp.full(num_rows * num_slots, NOTHING, jnp.int32)
    return rows.at[places].set(numbers, mode="drop", unique_indices=True).reshape(num_rows, num_slots)


def assign_rows(lengths: Array, width: int) -> tuple[Array, Array]:
    """For each text the row that it is put into and its first slot there, `[C]` int32 each.

    A row gets the longest text that is left, and then the shortest ones for as long as there is room: the longest and
    the shortest leave the least over. Texts of length 0 get no place: their row means nothing.
    """
    order = jnp.argsort(-lengths)
    descending = lengths[order]

    def place(state: _Place, _: None) -> tuple[_Place, tuple[Array, Array, Array]]:
        fits = state.used + descending[state.shortest] <= width
        chosen = jnp.where(fits, state.shortest, state.longest)
        row = jnp.where(fits, state.row, state.row + 1)
        offset = jnp.where(fits, state.used, 0)
        left = _Place(
            jnp.where(fits, state.longest, state.longest + 1),
            jnp.where(fits, state.shortest - 1, state.shortest),
            row,
            offset + descending[chosen],
        )
        return left, (order[chosen], row, offset)

    begin = _Place(*(jnp.asarray(x, jnp.int32) for x in (0, len(lengths) - 1, -1, width)))
    _, (text, row, offset) = lax.scan(place, begin, None, length=len(lengths))
    return jnp.zeros_like(row).at[text].set(row), jnp.zeros_like(offset).at[text].set(offset)


class _Place(NamedTuple):
    """Which texts are left, by their places in the order of lengths; the row that is filled, and its used slots."""

    longest: Array
    shortest: Array
    row: Array
    used: Array


def cut_packed(batch: Batch) -> Minibatches:
    """Minibatches of the rows that `pack_texts` gives, in chunks of some rows each."""
    num_slots = _slots(batch)
    size, prompt = _rows_of_chunk(num_slots), batch.rollout.episodes.context
    steps = cut_padded(as_single_steps(batch), size * num_slots)

    def take(rows: Array) -> Batch:
        return steps.take(_step_numbers(batch, rows).ravel())

    def chunk(rows: Array, minibatch: Batch, i: Array | int, num_chunks: Array | int) -> Batch:
        part: Any = steps.chunk(_step_numbers(batch, rows).ravel(), minibatch, i, num_chunks)
        part = jax.tree.map(lambda x: _as_rows(x, size), part)
        of_chunk = collectives.shard_columns(lax.dynamic_slice_in_dim(rows, i * size, size))
        context = _packed_texts(prompt, part.rollout.steps.obs.T, of_chunk, num_slots)
        return part._replace(rollout=part.rollout._replace(episodes=Episodes(context=context)))

    def num_chunks(rows: Array) -> Array:
        used = (rows != NOTHING).any(-1).sum(dtype=jnp.int32)
        return largest_in_batch(-(-used // size))

    return Minibatches(num_chunks, take, chunk)


def _as_rows(x: Array, size: int) -> Array:
    """Single steps `[1, size * S, ...]` as `[S, size, ...]`."""
    return collectives.shard_columns(x.reshape(size, -1, *x.shape[2:]).swapaxes(0, 1), axis=1)


def _packed_texts(prompt: Prompt, obs: Array, rows: Array, num_slots: int) -> PackedTexts:
    """The tokens of rows `[R, S]`: those of the prompts, and of the completions the observations, `[R, S]`."""
    empty, column, slot = rows == NOTHING, rows // num_slots, rows % num_slots
    prompt_length = prompt.tokens.shape[-1]
    of_prompt = prompt.tokens[jnp.maximum(column, 0), jnp.minimum(slot, prompt_length - 1)]
    text = jnp.where(empty, NOTHING, column)
    index = jnp.broadcast_to(jnp.arange(num_slots), rows.shape)
    begins = text != jnp.concatenate([jnp.full((len(text), 1), NOTHING - 1), text[:, :-1]], 1)
    position = index - lax.cummax(jnp.where(begins, index, 0), axis=1)
    return PackedTexts(jnp.where(slot < prompt_length, of_prompt, obs), text, position)


def _step_numbers(batch: Batch, rows: Array) -> Array:
    """Of slots of `pack_texts` the column among the single steps of the batch, NOTHING in prompts and empty slots."""
    num_slots, num_columns = _slots(batch), batch.weight.shape[1]
    step = rows % num_slots - (num_slots - len(batch.weight))
    return jnp.where((rows != NOTHING) & (step >= 0), step * num_columns + rows // num_slots, NOTHING)


def _matters(batch: Batch) -> Array:
    """`[B, S]` bool: a text's prompt and its completion up to the last step that trains; nothing if none does."""
    trains = batch.rollout.loss_mask.T > 0
    until_last = jnp.cumsum(trains[:, ::-1], -1)[:, ::-1] > 0
    prompt = batch.rollout.episodes.context.mask_before_last() & trains.any(-1, keepdims=True)
    return jnp.concatenate([prompt, until_last], 1)


def _slots(batch: Batch) -> int:
    """The length of a prompt and a completion."""
    return batch.rollout.episodes.context.tokens.shape[-1] + len(batch.weight)


def _rows_of_chunk(num_slots: int) -> int:
    return max(1, machine().chunk_tokens // num_slots)

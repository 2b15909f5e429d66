"""Gradients of texts of unequal length: texts are put side by side into rows, so padding is not worked through.

A rollout has as many rows as the longest completion may have, and its prompts as many slots as the longest of them.
The slots that matter, those of a prompt and of its completion up to the last token that trains, are laid one text after
the other into rows of the full length; a transformer attends within each text alone. A minibatch is worked through in
chunks of rows, as many as hold any text. Since the loss is a sum over steps in which all else weighs nothing, the
gradient is the same. Also known as sequence packing, or as a batch without padding.

Where a minibatch has several completions of a prompt, rows have the completions of one prompt each, and the prompt
itself is read once for all of them (shared_prompts.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Episodes, PackedTexts, Prompt, SharedPrompts
from jaxpg.update.batching import Minibatches
from jaxpg.update.objective import Batch, TextReader
from jaxpg.update.padding import NOTHING, as_single_steps, cut_padded
from jaxpg.vectorize import largest_in_batch


class Packing(NamedTuple):
    """How the texts of minibatches are laid into rows (static).

    own_prompt: slots of a text that are its own prompt, 0 where prompts are shared.
    num_slots: of a row, as many as the longest text may have.
    group_size: the texts of a row are of one group, which is this many neighbouring columns.
    rows: of a chunk.
    chunks: that hold any minibatch.
    """

    own_prompt: int
    num_slots: int
    group_size: int
    rows: int
    chunks: int


def packing_of(reader: TextReader | None, batch: Batch, num_minibatches: int = 1) -> Packing | None:
    """How the texts of this batch are packed; None where they are not: nothing reads them so, or they are one chunk."""
    if reader is None:
        return None
    columns, steps = batch.weight.shape[1], len(batch.weight)
    prompt, texts = batch.rollout.episodes.context.tokens.shape[-1], columns // num_minibatches
    if texts * (prompt + steps) <= machine().chunk_tokens:
        return None
    shares = reader.read_prompts is not None and _gains(prompt, steps, texts, columns // reader.group_size)
    own_prompt, group_size = (0, reader.group_size) if shares else (prompt, columns)
    rows, chunks = cut_rows(texts, max(1, machine().chunk_tokens // (own_prompt + steps)))
    return Packing(own_prompt, own_prompt + steps, group_size, rows, chunks)


def cut_rows(texts: int, at_most: int) -> tuple[int, int]:
    """Rows of a chunk, and chunks, where every text is a row: the fewest rows over all, and then the fewest chunks.

    A row without a text costs as much as one with, so up to twice as many chunks as are needed are considered: seven
    of at most ten rows hold 64 texts, with six rows to spare, and eight have none (benchmarks/LOG.md, "no row without a
    text").
    """
    fewest = -(-texts // at_most)
    chunks = min(range(fewest, 2 * fewest), key=lambda chunks: -(-texts // chunks) * chunks)
    return -(-texts // chunks), chunks


def _gains(prompt: int, steps: int, texts: int, groups: int) -> bool:
    """Whether prompts are better shared: they save more slots than are lost by half a row per group."""
    return (texts - groups) * prompt > groups * steps / 2


def pack_texts(packing: Packing, batch: Batch, columns: Array) -> Array:
    """`[R, S]` int32: the rows of a minibatch that has the texts of these columns, `[C]`.

    Of each slot `column * S + slot` where S is the length of a text, or NOTHING. R is the rows of all chunks; those
    with no text are the last ones.
    """
    num_columns, num_slots = batch.weight.shape[1], packing.num_slots
    chosen = jnp.zeros(num_columns, bool).at[columns].set(True, unique_indices=True)
    matters = _matters(packing, batch) & chosen[:, None]
    row, offset = _assign_rows_of_groups(matters.sum(-1), packing)
    num_rows = packing.rows * packing.chunks
    place = (row * num_slots + offset)[:, None] + jnp.cumsum(matters, -1) - 1
    places = jnp.where(matters, place, num_rows * num_slots)
    numbers = jnp.arange(num_columns * num_slots, dtype=jnp.int32).reshape(matters.shape)
    rows = jnp.full(num_rows * num_slots, NOTHING, jnp.int32)
    return rows.at[places].set(numbers, mode="drop", unique_indices=True).reshape(num_rows, num_slots)


def _assign_rows_of_groups(lengths: Array, packing: Packing) -> tuple[Array, Array]:
    """`assign_rows` for the texts of every group, whose rows come after those of the groups before it."""
    by_group = lengths.reshape(-1, packing.group_size)
    row, offset = jax.vmap(lambda lengths: assign_rows(lengths, packing.num_slots))(by_group)
    used = jnp.where(by_group > 0, row + 1, 0).max(-1)
    before = jnp.cumsum(used) - used
    return (before[:, None] + row).ravel(), offset.ravel()


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


def cut_packed(packing: Packing, batch: Batch) -> Minibatches:
    """Minibatches of the rows that `pack_texts` gives, in chunks of some rows each."""
    size, num_slots, prompt = packing.rows, packing.num_slots, batch.rollout.episodes.context
    steps = cut_padded(as_single_steps(batch), size * num_slots)

    def take(rows: Array) -> Batch:
        return steps.take(step_numbers(packing, batch, rows).ravel())

    def chunk(rows: Array, minibatch: Batch, i: Array | int, num_chunks: Array | int) -> Batch:
        part: Any = steps.chunk(step_numbers(packing, batch, rows).ravel(), minibatch, i, num_chunks)
        part = jax.tree.map(lambda x: _as_rows(x, size), part)
        of_chunk = collectives.shard_columns(lax.dynamic_slice_in_dim(rows, i * size, size))
        context = _packed_texts(packing, prompt, part.rollout.steps.obs.T, of_chunk)
        return part._replace(rollout=part.rollout._replace(episodes=Episodes(context=context)))

    def num_chunks(rows: Array) -> Array:
        used = (rows != NOTHING).any(-1).sum(dtype=jnp.int32)
        return largest_in_batch(-(-used // size))

    return Minibatches(num_chunks, take, chunk, None if packing.own_prompt else _of_groups(packing, prompt))


def _of_groups(packing: Packing, prompt: Prompt) -> Prompt:
    """The prompts of all groups, `[N, P]`."""
    return jax.tree.map(lambda x: x[:: packing.group_size], prompt)


def _as_rows(x: Array, size: int) -> Array:
    """Single steps `[1, size * S, ...]` as `[S, size, ...]`."""
    return collectives.shard_columns(x.reshape(size, -1, *x.shape[2:]).swapaxes(0, 1), axis=1)


def _packed_texts(packing: Packing, prompt: Prompt, obs: Array, rows: Array) -> PackedTexts:
    """The tokens of rows `[R, S]`: those of the prompts, and of the completions the observations, `[R, S]`."""
    empty, column, slot = rows == NOTHING, rows // packing.num_slots, rows % packing.num_slots
    text = jnp.where(empty, NOTHING, column)
    index = jnp.broadcast_to(jnp.arange(packing.num_slots), rows.shape)
    begins = text != jnp.concatenate([jnp.full((len(text), 1), NOTHING - 1), text[:, :-1]], 1)
    position = index - lax.cummax(jnp.where(begins, index, 0), axis=1)
    if packing.own_prompt:
        of_prompt = prompt.tokens[jnp.maximum(column, 0), jnp.minimum(slot, packing.own_prompt - 1)]
        return PackedTexts(jnp.where(slot < packing.own_prompt, of_prompt, obs), text, position)
    number = jnp.maximum(column[:, 0], 0) // packing.group_size
    real = _of_groups(packing, prompt).mask_before_last()[number]
    return PackedTexts(obs, text, position + real.sum(-1, keepdims=True), SharedPrompts(number, real))


def step_numbers(packing: Packing, batch: Batch, rows: Array) -> Array:
    """Of slots of `pack_texts` the column among the single steps of the batch, NOTHING in prompts and empty slots."""
    step = rows % packing.num_slots - packing.own_prompt
    number = step * batch.weight.shape[1] + rows // packing.num_slots
    return jnp.where((rows != NOTHING) & (step >= 0), number, NOTHING)


def _matters(packing: Packing, batch: Batch) -> Array:
    """`[B, S]` bool: a text up to the last step that trains; nothing if none does."""
    trains = batch.rollout.loss_mask.T > 0
    until_last = jnp.cumsum(trains[:, ::-1], -1)[:, ::-1] > 0
    if not packing.own_prompt:
        return until_last
    prompt = batch.rollout.episodes.context.mask_before_last() & trains.any(-1, keepdims=True)
    return jnp.concatenate([prompt, until_last], 1)

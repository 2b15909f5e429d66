"""How minibatches are gathered and cut into chunks, and how parameters are carried from one to the next.

Everything here is for speed and changes no result. The gains were measured on CPUs (benchmarks/LOG.md); what another
machine does instead is in `parallel/machine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine, rows_of_all
from jaxpg.types import Array, Prompt, Tree
from jaxpg.update.objective import Batch
from jaxpg.update.optimizers import FLAT_BELOW
from jaxpg.vectorize import count_chunks

WIDE = 64  # numbers per step, from which on an array is gathered chunk by chunk: see `_late_chunk`


class Minibatches(NamedTuple):
    """How minibatches are taken from a batch.

    num_chunks(columns): the gradient of the minibatch of these columns is summed over this many equal chunks of it.
    take(columns) -> Batch: the minibatch of these columns, None in place of the arrays that only `chunk` gathers.
    chunk(columns, minibatch, i, num_chunks) -> Batch: the i-th chunk of that minibatch, complete.
    prompts: those that the chunks' texts share, `[N, P]`, which the gradient reads for all chunks (shared_prompts.py).
    """

    num_chunks: Callable[[Array], Array | int]
    take: Callable[[Array], Batch]
    chunk: Callable[[Array, Batch, Array | int, Array | int], Batch]
    prompts: Prompt | None = None


def cut_minibatches(batch: Batch, num_columns: int, chunk_rows: int | None) -> Minibatches:
    """Minibatches of `num_columns` columns of `batch`, in chunks of at most `chunk_rows` rows (columns)."""
    num_chunks = count_chunks(num_columns, chunk_rows)
    if num_chunks == 1:
        return Minibatches(
            lambda columns: 1, stacked_gather(batch), lambda columns, minibatch, i, num_chunks: minibatch
        )
    wide = batch.rollout.map_columns(lambda axis, x: math.prod(x.shape[2:]) >= WIDE)
    late, early = partition(batch.rollout, wide)
    narrow = batch._replace(rollout=early)
    return Minibatches(
        lambda columns: num_chunks,
        lambda columns: columns_of(columns, narrow),
        partial(_late_chunk, late),
    )


def _late_chunk(late: Any, columns: Array, minibatch: Batch, i: Array | int, num_chunks: int) -> Batch:
    """The i-th chunk of a minibatch, whose wide arrays are gathered only now, from those of the whole batch.

    Replaces gathering them with the rest of the minibatch: observations of WIDE numbers and more would be written to
    memory and read again. 1.08 times as fast on a CPU (Breakout, 1,024 environments); for narrow arrays it costs up to
    a quarter (benchmarks/LOG.md, "large observations and the minibatch").
    """

    def take_chunk(axis: int, x: Array) -> Array:
        return take_columns(slice_columns(i, num_chunks, 0, columns), axis, x)

    chunk = nth_chunk(minibatch, i, num_chunks)
    return chunk._replace(rollout=merge(late.map_columns(take_chunk), chunk.rollout))


def stacked_gather(batch: Batch) -> Callable[[Array], Batch]:
    """`columns -> those columns of the batch`; on a CPU, all arrays with one word per step by one gather.

    That replaces one gather per array by partition, stack, gather, merge (`Machine.gathers_words`). Stacking the words
    of a large batch is one more copy, so batches that are worked through in chunks do without.
    """
    if not machine().gathers_words:
        return lambda columns: columns_of(columns, batch)
    word_size = batch.weight.dtype.itemsize
    floats = jnp.dtype(f"float{8 * word_size}")  # as they are, so that a gradient through this finds its way
    is_word = batch.map_columns(
        lambda axis, x: axis == 1 and x.shape == batch.weight.shape and x.dtype.itemsize == word_size
    )
    words, others = partition(batch, is_word)
    leaves, structure = jax.tree.flatten(words)
    stacked = jnp.stack([_as_type(x, floats) for x in leaves])  # [words, T, B]

    def gather(columns: Array) -> Batch:
        gathered = take_columns(columns, 2, stacked)
        gathered_words = [_as_type(x, leaf.dtype) for x, leaf in zip(gathered, leaves, strict=True)]
        gathered_others = columns_of(columns, others)
        return merge(jax.tree.unflatten(structure, gathered_words), gathered_others)

    return gather


def _as_type(x: Array, dtype: Any) -> Array:
    """The same bits as another type of as many; of the same type the array itself."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def pack_parameters(params: Tree, rows: int) -> tuple[Callable[[Tree], Tree], Callable[[Tree], Any]]:
    """`pack, unpack`: parameters as they are carried through a loop over minibatches of `rows`, and the way back.

    Replaces carrying every array: matrices stay, all scalars and vectors become one vector (`Machine.vectors_as_one`).
    Every array that is carried is a separate operation at the end of a step, and XLA on a CPU wakes another thread if
    more than eight can start at once, which for a small network costs more than the step. For the gain see
    `stacked_gather`. Where the machine gains by it, the matrices of a small network are part of the vector
    (`Machine.params_as_one`).
    """
    small = sum(x.size for x in jax.tree.leaves(params)) < FLAT_BELOW and collectives.auto_mesh.get() is None
    as_one = small and rows_of_all(rows) <= machine().params_as_one
    if not as_one and not machine().vectors_as_one:
        return (lambda params: params), (lambda carried: carried)
    largest = math.inf if as_one else 1
    packed = jax.tree.map(lambda x: x.ndim <= largest, params)
    unravel = ravel_pytree(partition(params, packed)[0])[1]

    def pack(params: Tree) -> Tree:
        vectors, others = partition(params, packed)
        return others, ravel_pytree(vectors)[0]

    def unpack(carried: Tree) -> Any:
        others, vector = carried
        return merge(unravel(vector), others)

    return pack, unpack


def in_rows(minibatch: Batch) -> Batch:
    """A minibatch of single steps, `[1, n, ...]`, as `[rows, n / rows, ...]` (`Machine.rows_of_steps`).

    It replaces one row, where several runs are side by side: their axis is then followed by one of length 1, and the
    compiler for TPUs puts a single row of each run into a tile that holds eight.
    """
    steps, rows = minibatch.weight.shape[1], machine().rows_of_steps
    if rows == 1 or rows_of_all(1) == 1 or steps % rows:
        return minibatch
    return jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[2:]), minibatch)


def partition(tree: Tree, chosen: Tree) -> tuple[Any, Any]:
    """Two trees like `tree`: the leaves where `chosen` is true, and the others; None in place of the rest."""
    first = jax.tree.map(lambda x, take: x if take else None, tree, chosen)
    second = jax.tree.map(lambda x, take: None if take else x, tree, chosen)
    return first, second


def merge(first: Tree, second: Tree) -> Any:
    """The tree of which `partition` made these two."""
    return jax.tree.map(lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None)


def columns_of(columns: Array, batch: Batch) -> Batch:
    """These columns of every array of a batch, one gather per array."""
    return batch.map_columns(partial(take_columns, columns))


def take_columns(columns: Array, axis: int, x: Array) -> Array:
    """`x[columns]` along an axis; no column may occur twice."""
    return collectives.shard_columns(jnp.take(x, columns, axis, unique_indices=True, mode="clip"), axis)


def slice_columns(i: Array | int, num_chunks: int, axis: int, x: Array) -> Array:
    """The i-th of `num_chunks` equal runs along an axis."""
    size = x.shape[axis] // num_chunks
    return collectives.shard_columns(lax.dynamic_slice_in_dim(x, i * size, size, axis), axis)


def nth_chunk(batch: Batch, i: Array | int, num_chunks: int) -> Batch:
    """The i-th of `num_chunks` equal runs of neighbouring columns."""
    return batch.map_columns(partial(slice_columns, i, num_chunks))

"""How minibatches are gathered and parameters carried where a CPU wants it so."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg.parallel import collectives
from jaxpg.types import Array, Tree
from jaxpg.update.objective import Batch

CPU_CHUNK_ROWS = 512  # benchmarks/LOG.md says what it was chosen from
WIDE = 64  # numbers in an observation, from which on gathering it chunk by chunk is the cheaper way


def map_batch_columns(batch: Batch, pick: Callable[..., Array], *others: Batch) -> Batch:
    """Some columns of a batch: `pick(axis, leaf)` of every leaf, with the like leaves of other batches behind it."""
    rollout = batch.rollout.map_columns(pick, *(other.rollout for other in others))
    names = [name for name in batch._fields if name != "rollout"]
    trees = {name: [getattr(each, name) for each in (batch, *others)] for name in names}
    return Batch(rollout=rollout, **{name: jax.tree.map(partial(pick, 1), *trees[name]) for name in names})


def gather_words(batch: Batch) -> Callable[[Array], Batch]:
    """`columns -> those columns of the batch`; all that is one word a step is laid side by side and gathered at once.

    For small minibatches, which take longer to call for than to work on. Of large ones it would be one more copy.
    """
    word = batch.weight.dtype.itemsize
    bits = jnp.dtype(f"uint{8 * word}")
    words: list[Array] = []

    def is_word(axis: int, x: Array) -> bool:
        return axis == 1 and x.shape == batch.weight.shape and x.dtype.itemsize == word

    def lay(axis: int, x: Array) -> Array:
        if is_word(axis, x):
            words.append(lax.bitcast_convert_type(x, bits))
        return x

    map_batch_columns(batch, lay)
    table = jnp.stack(words)

    def gather(columns: Array) -> Batch:
        gathered = iter(take_columns(columns, 2, table))

        def pick(axis: int, x: Array) -> Array:
            return (
                lax.bitcast_convert_type(next(gathered), x.dtype)
                if is_word(axis, x)
                else take_columns(columns, axis, x)
            )

        return map_batch_columns(batch, pick)

    return gather


def pack_vectors(params: Tree) -> tuple[Callable[[Tree], Tree], Callable[[Tree], Any]]:
    """How parameters are carried through a loop, matrices as they are and all vectors as one, and the way back.

    Every array that is carried is an operation of its own at the end of a step, and XLA wakes another thread where more
    than eight can start at once: for a small network dearer than the step (benchmarks/LOG.md).
    """
    leaves, structure = jax.tree.flatten(params)
    is_vector = [x.ndim <= 1 for x in leaves]
    apart = ravel_pytree([x for x, vector in zip(leaves, is_vector, strict=True) if vector])[1]

    def packed(params: Tree) -> Tree:
        each = list(zip(jax.tree.leaves(params), is_vector, strict=True))
        return [x for x, vector in each if not vector], ravel_pytree([x for x, vector in each if vector])[0]

    def unpacked(carried: Tree) -> Any:
        matrices, vectors = iter(carried[0]), iter(apart(carried[1]))
        return jax.tree.unflatten(structure, [next(vectors if vector else matrices) for vector in is_vector])

    return packed, unpacked


def take_columns(columns: Array, axis: int, x: Array) -> Array:
    """The columns of these numbers, none of them twice."""
    return collectives.shard_columns(jnp.take(x, columns, axis, unique_indices=True, mode="clip"), axis)


def slice_columns(i: Array | int, chunks: int, axis: int, x: Array) -> Array:
    """The i-th of so many equal runs along an axis."""
    size = x.shape[axis] // chunks
    return collectives.shard_columns(lax.dynamic_slice_in_dim(x, i * size, size, axis), axis)


def nth_chunk(batch: Batch, i: Array | int, chunks: int) -> Batch:
    """The i-th of so many runs of neighbouring columns."""
    return map_batch_columns(batch, partial(slice_columns, i, chunks))


def gathered_chunk(whole: Batch, columns: Array, batch: Batch, i: Array | int, chunks: int) -> Batch:
    """The i-th run of a `batch` that are the `columns` of `whole`; what is wide is gathered only now.

    Gathered all at once, the large observations of a minibatch would be written to memory and read again.
    """

    def pick(axis: int, gathered: Array, source: Array) -> Array:
        if math.prod(source.shape[2:]) < WIDE:
            return slice_columns(i, chunks, axis, gathered)
        return take_columns(slice_columns(i, chunks, 0, columns), axis, source)

    return map_batch_columns(batch, pick, whole)


def num_chunks(num_columns: int, rows: int | None) -> int:
    """The fewest equal parts of at most `rows` columns."""
    if rows is None or num_columns <= rows:
        return 1
    return next(n for n in range(-(-num_columns // rows), num_columns + 1) if num_columns % n == 0)

"""One forward pass over a whole rollout, before its updates: a critic's values, log-probabilities under a reference."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Params, Rollout, Tree
from jaxpg.update.objective import Batch, TextReader
from jaxpg.update.packing import cut_packed, pack_texts, packing_of, step_numbers
from jaxpg.update.padding import NOTHING, as_single_steps, cut_padded, steps_of_chunk, training_steps_first
from jaxpg.update.shared_prompts import read_all, with_memories
from jaxpg.vectorize import over_chunks


def forward_pass(
    output: Callable[[Params, Rollout], Tree],
    reader: TextReader | None,
    params: Params,
    rollout: Rollout,
    *,
    padded_steps: bool = False,
) -> Tree:
    """`output(params, rollout)`, leaves `[T, B]`: numbers of every step, of which nothing is differentiated.

    Texts are put side by side, and prompts read once per group, where an update of as many would do so (packing.py).
    It replaces one row per completion, on every platform: slots behind the end of a completion cost nothing, and there
    are no more activations at a time than those of a chunk. The numbers are then 0 on padding. What that gains:
    benchmarks/LOG.md, "reference log-probabilities side by side". With `padded_steps`, of whole episodes of which
    `output` takes each step by itself, those on padding are left out in the same way ("the reference of padding").
    """
    nothing: Tree = ()
    mask = rollout.steps.mask
    batch = Batch(rollout._replace(loss_mask=mask), nothing, nothing, nothing, mask, nothing, nothing)
    packing = packing_of(reader, batch)
    if packing is None and padded_steps and mask.size > machine().chunk_padded and not collectives.auto_mesh.get():
        return _of_real_steps(output, params, batch)
    if packing is None:
        return output(params, rollout)
    rows = pack_texts(packing, batch, jnp.arange(mask.shape[1]))
    texts = cut_packed(packing, batch)
    taken = texts.take(rows)
    memories = None if texts.prompts is None else collectives.whole(read_all(reader, texts.prompts, params))

    def of_chunk(i: Array) -> Tree:
        chunk = texts.chunk(rows, taken, i, packing.chunks).rollout
        chunk = chunk if memories is None else with_memories(chunk, memories)
        return jax.tree.map(jnp.transpose, output(params, chunk))

    def put(i: Array, found: Tree, new: Tree) -> Tree:
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * packing.rows, 0), found, new)

    found = over_chunks(of_chunk, texts.num_chunks(rows), lambda x: jnp.zeros(rows.shape, x.dtype), put)
    places = step_numbers(packing, batch, rows)
    return jax.tree.map(lambda x: _as_steps(x, places, mask.shape), found)


def _of_real_steps(output: Callable[[Params, Rollout], Tree], params: Params, batch: Batch) -> Tree:
    """`output` of the steps that are no padding, in chunks, as many as hold any; leaves `[T, B]`, 0 on padding."""
    steps = as_single_steps(batch)
    columns, size = training_steps_first(steps)[0], steps_of_chunk(batch.weight.size)
    cut = cut_padded(steps, size)
    taken, places = cut.take(columns), jnp.where(columns == NOTHING, len(columns), columns)

    def of_chunk(i: Array) -> Tree:
        return jax.tree.map(lambda x: x[0], output(params, cut.chunk(columns, taken, i, 1).rollout))

    def put(i: Array, found: Tree, new: Tree) -> Tree:
        these = lax.dynamic_slice_in_dim(places, i * size, size)
        return jax.tree.map(lambda x, y: x.at[these].set(y, mode="drop"), found, new)

    found = over_chunks(of_chunk, cut.num_chunks(columns), lambda x: jnp.zeros(columns.shape, x.dtype), put)
    return jax.tree.map(lambda x: x.reshape(batch.weight.shape), found)


def _as_steps(x: Array, places: Array, shape: tuple[int, ...]) -> Array:
    """Numbers of the slots of rows, `[R, S]`, as `[T, B]`, 0 where no slot belongs."""
    size = shape[0] * shape[1]
    places = jnp.where(places == NOTHING, size, places)
    steps = jnp.zeros(size, x.dtype).at[places.ravel()].set(x.ravel(), mode="drop").reshape(shape)
    return collectives.shard_columns(steps, axis=1)

"""The gradient of a loss, summed over chunks and devices, and one step of an optimizer.

An update has the signature `update(objective, optimizer, learning_rate, params, opt_state, batch, key)` and returns
`params, opt_state, metrics`. There are three: `gradient_step` here, `minibatches.minibatch_epochs` and
`trust_region.trust_region_step`. Losses are sums over the steps of this device of weight times loss; gradients and
metrics are summed over devices in `summed_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Key, Metrics, Params, Tree
from jaxpg.update.batching import Minibatches, nth_chunk
from jaxpg.update.objective import COUNTED, Batch, Objective
from jaxpg.update.optimizers import gradient_norms
from jaxpg.update.packing import cut_packed, pack_texts, packing_of
from jaxpg.update.padding import as_single_steps, cut_padded, skips_padding, steps_of_chunk, training_steps_first
from jaxpg.update.shared_prompts import loss_with_memories, read_all
from jaxpg.vectorize import count_chunks, over_chunks


def gradient_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
) -> tuple[Params, Tree, Metrics]:
    """One step along the gradient of the loss over the whole batch; `key` is for the noise of the policy alone."""
    gradient, metrics = _gradient_of_all(objective, params, objective.draw_noise(key, objective.as_minibatch(batch)))
    params, opt_state, norms = apply_gradient(optimizer, learning_rate, gradient, params, opt_state)
    del metrics[COUNTED]
    return params, opt_state, metrics | norms


def _gradient_of_all(objective: Objective, params: Params, batch: Batch) -> tuple[Tree, Metrics]:
    """The gradient of the loss over a whole batch, without working through padding where that is a gain."""
    packing = packing_of(objective.text_reader, batch)
    if skips_padding(objective, batch.weight.size):
        steps = as_single_steps(batch)
        columns, cut = training_steps_first(steps)[0], cut_padded(steps, steps_of_chunk(batch.weight.size))
    elif packing:
        columns = pack_texts(packing, batch, jnp.arange(batch.weight.shape[1]))
        cut = cut_packed(packing, batch)
    else:
        return summed_gradient(objective.loss, params, batch, _chunks_of_columns(objective, batch))
    return minibatch_gradient(objective, params, cut, columns, cut.take(columns))


def _chunks_of_columns(objective: Objective, batch: Batch) -> int:
    """How many equal runs of whole columns have at most as many steps as suit the machine (`Machine.chunk_rows`)."""
    num_steps, num_columns = batch.weight.shape
    rows = machine().chunk_rows
    return 1 if rows is None or objective.texts else count_chunks(num_columns, max(1, rows // num_steps))


def minibatch_gradient(
    objective: Objective,
    params: Params,
    cut: Minibatches,
    columns: Array,
    minibatch: Batch,
    *,
    lifted: bool = True,
) -> tuple[Tree, Metrics]:
    """The gradient of the loss over the minibatch of these columns, and its metrics, summed over all devices."""
    if objective.texts and not collectives.auto_mesh.get():
        lifted = False  # a transformer's layers do as much by `dot_rows`, which devices that share a model do not use
    num_chunks, chunk = cut.num_chunks(columns), partial(cut.chunk, columns)
    if cut.prompts is None:
        return summed_gradient(objective.loss, params, minibatch, num_chunks, chunk, lifted=lifted)
    memories, differentiate_memories = jax.vjp(partial(read_all, objective.text_reader, cut.prompts), params)
    memories = collectives.whole(memories)  # on SHARD, once for all chunks
    loss = partial(loss_with_memories, objective)
    (of_texts, cotangent), metrics = _summed(loss, (params, memories), minibatch, num_chunks, chunk, lifted)
    (of_prompts,) = differentiate_memories(cotangent)
    return collectives.psum((jax.tree.map(jnp.add, of_texts, of_prompts), metrics))


def summed_gradient(
    loss: Callable[[Any, Any], tuple[Array, Metrics]],
    params: Tree,
    batch: Tree,
    num_chunks: Array | int = 1,
    chunk: Callable[[Any, Array | int, Any], Any] = nth_chunk,
    *,
    lifted: bool = True,
) -> tuple[Tree, Metrics]:
    """The gradient of a loss and its additive metrics, summed over all devices.

    With `num_chunks` > 1 the batch is cut into chunks, `chunk(batch, i, num_chunks)` being the i-th of them, which are
    differentiated one after the other and added up. Since the loss is a sum over steps, the result is the same, and
    only the activations of one chunk are in memory at a time. Their number may be traced. `lifted` is for speed alone:
    see `_through_vmap_of_one`.
    """
    return collectives.psum(_summed(loss, params, batch, num_chunks, chunk, lifted))


def _summed(
    loss: Callable[[Any, Any], tuple[Array, Metrics]],
    params: Tree,
    batch: Tree,
    num_chunks: Array | int,
    chunk: Callable[[Any, Array | int, Any], Any],
    lifted: bool,
) -> tuple[Any, Metrics]:
    """`summed_gradient` of this device alone."""
    differentiate = jax.grad(loss, has_aux=True)
    if lifted:
        differentiate = _through_vmap_of_one(differentiate)
    if isinstance(num_chunks, int) and num_chunks == 1:
        return differentiate(params, batch)

    def of_chunk(i: Array) -> tuple[Tree, Metrics]:
        return differentiate(params, chunk(batch, i, num_chunks))

    def add(i: Array, total: Tree, new: Tree) -> Tree:
        return jax.tree.map(jnp.add, total, new)

    return over_chunks(of_chunk, num_chunks, lambda x: jnp.zeros(x.shape, x.dtype), add)


def _through_vmap_of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function through a `vmap` over an axis of length one.

    Replaces a plain call. XLA on a CPU then transposes the factors of a weight gradient in memory first: a PPO loop
    takes 2.43 instead of 3.44 CPU seconds per million steps, 29% less (benchmarks/LOG.md, "the weight gradient's
    layout"). With layer normalisation it is a loss: 184 instead of 96 us for a gradient of 128 rows ("layer
    normalisation" there), and with a transformer XLA for GPUs leaves ten transpositions of weight gradients as kernels
    of their own ("a token in fewer kernels"); chips that share a model, though, exchange 13.1 instead of 10.8 GB for a
    chunk without. With other networks it neither adds nor saves an operation worth the name on accelerators ("compiled
    for machines not here").
    """

    def lifted(*arguments: Any) -> Any:
        stacked = jax.tree.map(lambda x: x[None], arguments)
        return jax.tree.map(lambda x: x[0], jax.vmap(function)(*stacked))

    return lifted


def apply_gradient(
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    gradient: Tree,
    params: Tree,
    opt_state: Tree,
) -> tuple[Any, Tree, Metrics]:
    """`params, opt_state, norms` after params <- params - learning_rate * optimizer(gradient).

    The optimizer's updates point uphill and contain no learning rate. `norms` are those of the gradient before
    clipping, see `gradient_norms`.
    """
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    params = jax.tree.map(lambda p, u: (p - learning_rate * u).astype(p.dtype), params, updates)
    return params, opt_state, gradient_norms(gradient, opt_state)

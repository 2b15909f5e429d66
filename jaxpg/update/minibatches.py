"""Epochs of minibatches: take, prepare, differentiate, apply, and stop early where the KL grows too large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpg.errors import UserError
from jaxpg.parallel import collectives
from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Key, Metrics, Params, Tree
from jaxpg.update.batching import Minibatches, columns_of, cut_minibatches, in_rows, pack_parameters
from jaxpg.update.gradients import apply_gradient, minibatch_gradient
from jaxpg.update.objective import COUNTED, MEANS_OVER_STEPS, Batch, Objective
from jaxpg.update.packing import cut_packed, pack_texts, packing_of
from jaxpg.update.padding import as_single_steps, cut_padded, shuffled_shares, skips_padding, steps_of_chunk
from jaxpg.update.shuffle import random_permutations
from jaxpg.vectorize import scan_packed, tree_where


class _Progress(NamedTuple):
    """What is carried from minibatch to minibatch.

    params: as `pack_parameters` packs them.
    running: [] bool, false once the KL was too large.
    """

    params: Tree
    opt_state: Tree
    running: Array


class _Prepared(NamedTuple):
    """The fields of a Batch that `Objective.as_minibatch` fills, for all minibatches: `[minibatches, ...]`."""

    advantage: Tree
    minibatch_weight: Array


class _Cut(NamedTuple):
    """The minibatches of all epochs.

    orders: `[minibatches, ...]` int32, of each the columns as `minibatches` takes them.
    whole(columns): the minibatch of these columns with at least what `Objective.as_minibatch` reads.
    """

    orders: Array
    minibatches: Minibatches
    whole: Callable[[Array], Batch]


def minibatch_epochs(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
    *,
    epochs: int,
    num_minibatches: int,
    target_kl: Array | float | None = None,
    chunk_rows: int | None = None,
    lifted: bool = True,
) -> tuple[Params, Tree, Metrics]:
    """`epochs` passes over the batch, each in a new random order and cut into `num_minibatches` gradient steps.

    A minibatch consists of single steps, or of whole columns where the policy needs trajectories. Weights are
    multiplied by `num_minibatches`, so that each loss estimates that of the whole batch.

    With `target_kl`, no further step is taken once the approximate KL (k3) of a minibatch to the collecting policy
    exceeds 1.5 target_kl (the early stop of OpenAI's Spinning Up and of Stable-Baselines3).

    Padding after the end of episodes is skipped where that is a gain, and minibatches are equal shares of the steps
    that train (padding.py). The gradient of a minibatch is summed over chunks of at most `chunk_rows` rows (columns),
    which is exact; None is what suits the machine: `Machine.chunk_rows`, without padding `Machine.chunk_padded`, of
    texts `Machine.chunk_texts`. With None, texts are put side by side (packing.py). `lifted` is that of
    `summed_gradient`.

    Metrics are means over all minibatches, MEANS_OVER_STEPS over those that hold a step which counts; `updates` is the
    number of steps taken on such minibatches.
    """
    noise_keys: Tree = ()
    if objective.noise:
        key, noise_key = jax.random.split(key)
        noise_keys = jax.random.split(noise_key, epochs * num_minibatches)
    cut = _cut(objective, batch, key, epochs, num_minibatches, chunk_rows)
    pack, unpack = pack_parameters(params, batch.weight.size // num_minibatches)

    def one_minibatch(progress: _Progress, inputs: tuple[Array, Tree, Tree]) -> tuple[_Progress, Metrics]:
        columns, prepared, noise_key = inputs
        params, opt_state = unpack(progress.params), progress.opt_state
        minibatch = cut.minibatches.take(columns)
        if isinstance(prepared, _Prepared):
            minibatch = minibatch._replace(**prepared._asdict())
        else:
            minibatch = objective.as_minibatch(minibatch)
        minibatch = objective.draw_noise(noise_key, minibatch)
        num_chunks = cut.minibatches.num_chunks(columns)
        if not objective.needs_trajectories and isinstance(num_chunks, int) and num_chunks == 1:
            minibatch = in_rows(minibatch)
        gradient, metrics = minibatch_gradient(objective, params, cut.minibatches, columns, minibatch, lifted=lifted)
        running = _still_running(progress.running, metrics, target_kl)
        new_params, new_opt_state, norms = apply_gradient(optimizer, learning_rate, gradient, params, opt_state)
        if target_kl is not None:
            new_params, new_opt_state = tree_where(running, (new_params, new_opt_state), (params, opt_state))
        counted = jnp.round(metrics[COUNTED])  # 1 but for rounding; all metrics of one type are stored as one vector
        metrics = {**metrics, **norms, COUNTED: counted, "updates": running * counted}
        return _Progress(pack(new_params), new_opt_state, running), metrics

    start = _Progress(pack(params), opt_state, jnp.ones((), bool))
    progress, metrics = scan_packed(one_minibatch, start, (cut.orders, _prepared(objective, cut), noise_keys))
    return unpack(progress.params), progress.opt_state, _over_minibatches(metrics)


def _over_minibatches(metrics: Metrics) -> Metrics:
    """Metrics `[minibatches]` of gradient steps as those of the update.

    MEANS_OVER_STEPS are 0 where no minibatch had a step that counts, which `updates` of 0 says.
    """
    counted = metrics[COUNTED].mean()
    means = {name: x.mean() for name, x in metrics.items() if name not in (COUNTED, "updates")}
    means |= {name: means[name] / jnp.where(counted > 0, counted, 1) for name in MEANS_OVER_STEPS if name in means}
    return {**means, "updates": metrics["updates"].sum()}


def _cut(
    objective: Objective, batch: Batch, key: Key, epochs: int, num_minibatches: int, chunk_rows: int | None
) -> _Cut:
    """The minibatches of an update, without padding where that is a gain.

    Raises:
        UserError: the batch, padding included, does not divide into equal minibatches.
    """
    without_padding = skips_padding(objective, batch.weight.size, num_minibatches)
    packing = packing_of(objective.text_reader, batch, num_minibatches) if chunk_rows is None else None
    batch = batch if objective.needs_trajectories else as_single_steps(batch)
    batch = batch._replace(weight=batch.weight * num_minibatches)
    if (rows := batch.weight.shape[1]) % num_minibatches:
        raise UserError(f"num_minibatches = {num_minibatches} does not divide a batch of {rows} rows.")
    if without_padding:
        orders = shuffled_shares(collectives.device_key(key), batch, epochs, num_minibatches)
        minibatches = cut_padded(batch, steps_of_chunk(orders.shape[1], chunk_rows))
        return _Cut(orders, minibatches, minibatches.take)
    # All orders are drawn by one call: random-number code is a large part of what there is to compile.
    orders = random_permutations(collectives.device_key(key), epochs, rows).reshape(epochs * num_minibatches, -1)
    if packing:
        minibatches = cut_packed(packing, batch)
        return _Cut(jax.vmap(partial(pack_texts, packing, batch))(orders), minibatches, minibatches.take)
    if chunk_rows is None:
        chunk_rows = machine().chunk_texts if objective.texts else machine().chunk_rows
    return _Cut(orders, cut_minibatches(batch, orders.shape[1], chunk_rows), partial(columns_of, batch=batch))


def _prepared(objective: Objective, cut: _Cut) -> _Prepared | tuple[()]:
    """What `Objective.as_minibatch` changes, of every minibatch, `[minibatches, ...]`, computed before the first.

    None of it depends on the parameters. Empty where a minibatch had better compute its own: on a single CPU
    (`Machine.prepares_minibatches`). Devices that share a minibatch then add up their sums for all minibatches at once.
    """
    if not machine().prepares_minibatches and collectives.num_shards() == 1:
        return ()

    def of_columns(columns: Array) -> _Prepared:
        minibatch = objective.as_minibatch(cut.whole(columns))
        return _Prepared(minibatch.advantage, minibatch.minibatch_weight)

    return jax.vmap(of_columns)(cut.orders)


def _still_running(running: Array, metrics: Metrics, target_kl: Array | float | None) -> Array:
    """Whether this minibatch and all before it are within 1.5 target_kl of the collecting policy."""
    return running if target_kl is None else running & (metrics["approx_kl"] <= 1.5 * target_kl)

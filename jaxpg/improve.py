"""From a loss to new parameters: a gradient step, epochs of minibatches, or a natural-gradient step in a trust region.

All three share one signature, `improve(objective, optimizer, learning_rate, params, opt_state, batch, key)`, and return
`params, opt_state, metrics`. Losses are sums over the steps of this device of weight times loss; gradients and metrics
are summed over devices here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxpg import parallel
from jaxpg.shuffle import permutations
from jaxpg.types import Array, Key, Metrics, Params, Rollout, Tree

CPU_CHUNK_ROWS = 512  # benchmarks/LOG.md says what it was chosen from
WIDE = 64  # numbers in an observation, from which on gathering it chunk by chunk is the cheaper way


class Batch(NamedTuple):
    """What the losses read, leaves `[T, B, ...]`.

    advantage, target: of the credit; old_value: the critic's value before any update.
    weight: of each step in the loss; sums to 1 (or as the aggregate says) over all devices.
    share: the same, but summing to 1 over the minibatch on all devices, for metrics that are means; `()` until a
        minibatch is made.
    reference_log_prob: of the action under the reference policy, `()` without one.
    """

    rollout: Rollout
    advantage: Array
    target: Array
    old_value: Array
    weight: Array
    share: Tree
    reference_log_prob: Tree


Loss = Callable[[Params, Batch], tuple[Array, Metrics]]


class Objective(NamedTuple):
    """What is to be made small. Losses return their value on this device and additive metrics.

    policy_loss, value_loss: None where there is no critic.
    distribution(params, batch): the policy's distribution over actions, [T, B].
    normalize(advantage, mask): how advantages are scaled before they are used, once per minibatch.
    sequential: the policy reads whole columns, which minibatches must not cut.
    """

    policy_loss: Loss
    value_loss: Loss | None
    distribution: Callable[[Params, Batch], Any]
    normalize: Callable[[Array, Array], Array]
    sequential: bool

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Metrics]:
        """The policy's loss plus the critic's."""
        policy_loss, metrics = self.policy_loss(params, batch)
        if self.value_loss is None:
            return policy_loss, metrics
        value_loss, value_metrics = self.value_loss(params, batch)
        return policy_loss + value_loss, {**metrics, **value_metrics}

    def prepared(self, batch: Batch) -> Batch:
        """The batch made one minibatch: what depends on all its steps, before it is cut into chunks."""
        total = jnp.maximum(parallel.psum(batch.weight.sum()), jnp.finfo(batch.weight.dtype).tiny)
        return batch._replace(
            advantage=self.normalize(batch.advantage, batch.rollout.trains), share=batch.weight / total
        )


def gradient_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
) -> tuple[Params, Tree, Metrics]:
    """One step along the gradient of the loss over the whole batch."""
    gradient, metrics = summed_gradient(objective.loss, params, objective.prepared(batch))
    params, opt_state, norm = apply(optimizer, learning_rate, gradient, params, opt_state)
    return params, opt_state, {**metrics, "gradient_norm": norm}


def minibatches(
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
    target_kl: float | None = None,
    chunk_rows: int | None = None,
) -> tuple[Params, Tree, Metrics]:
    """`epochs` passes over the batch, each in a fresh order and cut into `num_minibatches` gradient steps.

    Minibatches are cut from single steps, or from whole columns where the policy reads columns. Weights are scaled by
    the number of minibatches, so that each loss estimates that of the whole batch. With `target_kl`, no further step
    is taken once the approximate KL (k3) of a minibatch to the collecting policy exceeds 1.5 times it (the early stop
    of OpenAI's Spinning Up and of Stable-Baselines3). A minibatch's gradient is summed over chunks of at most
    `chunk_rows` rows (columns): exact, and faster where a chunk fits a cache that the minibatch does not. Not given, it
    is what suits the machine: CPU_CHUNK_ROWS on a CPU, the whole minibatch elsewhere.
    """
    if chunk_rows is None and jax.default_backend() == "cpu":
        chunk_rows = CPU_CHUNK_ROWS
    batch = batch if objective.sequential else _as_steps(batch)
    num_columns = batch.weight.shape[1]
    batch = batch._replace(weight=batch.weight * num_minibatches)
    # Drawn here, in one call: random-number code is a large part of what there is to compile.
    orders = permutations(parallel.own_key(key), epochs, num_columns).reshape(epochs * num_minibatches, -1)
    chunks = _num_chunks(orders.shape[1], chunk_rows)
    gather = _gathering(batch) if chunks == 1 else lambda columns: _columns(batch, partial(_take, columns))
    packed, unpacked = _packing(params)

    def minibatch(carry: tuple[Tree, Tree, Array], columns: Array) -> tuple[tuple[Tree, Tree, Array], Metrics]:
        params, opt_state, going = unpacked(carry[0]), *carry[1:]
        chosen = objective.prepared(gather(columns))
        part = partial(_gathered_part, batch._replace(share=chosen.share), columns)
        gradient, metrics = summed_gradient(objective.loss, params, chosen, chunks, part)
        if target_kl is not None:
            going = going & (metrics["approx_kl"] <= 1.5 * target_kl)
        new_params, new_opt_state, norm = apply(optimizer, learning_rate, gradient, params, opt_state)
        if target_kl is not None:
            keep = partial(jnp.where, going)
            new_params = jax.tree.map(keep, new_params, params)
            new_opt_state = jax.tree.map(keep, new_opt_state, opt_state)
        metrics = {**metrics, "gradient_norm": norm, "updates": going.astype(norm.dtype)}
        return (packed(new_params), new_opt_state, going), metrics

    carry = (packed(params), opt_state, jnp.ones((), bool))
    (carried, opt_state, _), metrics = lax.scan(minibatch, carry, orders)
    taken = metrics.pop("updates")
    return unpacked(carried), opt_state, {**jax.tree.map(jnp.mean, metrics), "updates": taken.sum()}


def trust_region(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    params: Params,
    opt_state: Tree,
    batch: Batch,
    key: Key,
    *,
    max_kl: float,
    conjugate_steps: int,
    damping: float,
    backtracks: int,
    value_epochs: int,
    value_minibatches: int,
) -> tuple[Params, Tree, Metrics]:
    """A natural-gradient step on the policy, then epochs of ordinary ones on the critic.

        s = F^-1 g by conjugate gradients,  step = sqrt(2 max_kl / s.F s) s,

    halved until the loss falls and the mean KL(old || new) is at most `max_kl`, at most `backtracks` times; else the
    policy stays (Schulman et al. 2015, "Trust Region Policy Optimization", appendix C). F is the Fisher information,
    the Hessian of that KL at the old parameters, plus `damping` on its diagonal. `optimizer` serves the critic alone.
    """
    prepared = objective.prepared(batch)
    old = lax.stop_gradient(objective.distribution(params, batch))
    flat, unravel = ravel_pytree(params.policy)

    def loss(flat: Array) -> Array:
        return parallel.psum(objective.policy_loss(params._replace(policy=unravel(flat)), prepared)[0])

    def local_kl(flat: Array) -> Array:
        return (prepared.share * old.kl(objective.distribution(params._replace(policy=unravel(flat)), batch))).sum()

    def fisher(vector: Array) -> Array:
        return parallel.psum(jax.jvp(jax.grad(local_kl), (flat,), (vector,))[1]) + damping * vector

    gradient, metrics = summed_gradient(objective.policy_loss, params, prepared)
    descent = -ravel_pytree(gradient.policy)[0]
    direction = conjugate_gradient(fisher, descent, conjugate_steps)
    curvature = direction @ fisher(direction)
    step = jnp.sqrt(2 * max_kl / jnp.maximum(curvature, 1e-12)) * direction
    before = loss(flat)

    def try_step(carry: tuple[Array, Array, Array], scale: Array) -> tuple[tuple[Array, Array, Array], None]:
        best, best_kl, accepted = carry
        candidate = flat + scale * step
        kl = parallel.psum(local_kl(candidate))
        accept = ~accepted & (loss(candidate) < before) & (kl <= max_kl)
        return (jnp.where(accept, candidate, best), jnp.where(accept, kl, best_kl), accepted | accept), None

    start = (flat, jnp.zeros_like(before), jnp.zeros((), bool))
    (flat, kl, accepted), _ = lax.scan(try_step, start, 0.5 ** jnp.arange(backtracks, dtype=flat.dtype))
    params = params._replace(policy=unravel(flat))
    metrics = {**metrics, "kl": kl, "accepted": accepted.astype(flat.dtype)}

    if objective.value_loss is not None:
        critic = objective._replace(policy_loss=partial(_of_critic_alone, objective.value_loss), value_loss=None)
        params, opt_state, value_metrics = minibatches(
            critic, optimizer, learning_rate, params, opt_state, batch, key,
            epochs=value_epochs, num_minibatches=value_minibatches,
        )  # fmt: skip
        metrics = {**value_metrics, **metrics}
    return params, opt_state, metrics


def _of_critic_alone(value_loss: Loss, params: Params, batch: Batch) -> tuple[Array, Metrics]:
    """The critic may read a torso that belongs to the policy, whose step has been taken."""
    return value_loss(params._replace(policy=lax.stop_gradient(params.policy)), batch)


def conjugate_gradient(matvec: Callable[[Array], Array], b: Array, steps: int) -> Array:
    """`steps` of conjugate gradients on A x = b from x = 0, A symmetric positive definite (Hestenes and Stiefel 1952).

    Stops moving where the residual has vanished, so that extra steps do no harm.
    """

    def step(carry: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        x, residual, direction, norm = carry
        product = matvec(direction)
        curvature = direction @ product
        moving = (norm > 1e-10 * (b @ b)) & (curvature > 0)
        alpha = jnp.where(moving, norm / jnp.where(moving, curvature, 1.0), 0.0)
        x, residual = x + alpha * direction, residual - alpha * product
        new_norm = residual @ residual
        beta = jnp.where(moving, new_norm / jnp.where(moving, norm, 1.0), 0.0)
        return (x, residual, jnp.where(moving, residual + beta * direction, direction), new_norm), None

    (x, *_), _ = lax.scan(step, (jnp.zeros_like(b), b, b, b @ b), None, steps)
    return x


def _columns(batch: Batch, pick: Callable[..., Array], *others: Batch) -> Batch:
    """Some columns of a batch: `pick(axis, leaf)` of every leaf, with the like leaves of other batches behind it."""
    rollout = batch.rollout.map_columns(pick, *(other.rollout for other in others))
    names = [name for name in batch._fields if name != "rollout"]
    trees = {name: [getattr(each, name) for each in (batch, *others)] for name in names}
    return Batch(rollout=rollout, **{name: jax.tree.map(partial(pick, 1), *trees[name]) for name in names})


def _gathering(batch: Batch) -> Callable[[Array], Batch]:
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

    _columns(batch, lay)
    table = jnp.stack(words)

    def gather(columns: Array) -> Batch:
        gathered = iter(_take(columns, 2, table))

        def pick(axis: int, x: Array) -> Array:
            return lax.bitcast_convert_type(next(gathered), x.dtype) if is_word(axis, x) else _take(columns, axis, x)

        return _columns(batch, pick)

    return gather


def _packing(params: Tree) -> tuple[Callable[[Tree], Tree], Callable[[Tree], Any]]:
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


def _take(columns: Array, axis: int, x: Array) -> Array:
    """The columns of these numbers, none of them twice."""
    return parallel.columns(jnp.take(x, columns, axis, unique_indices=True, mode="clip"), axis)


def _slice(i: Array | int, chunks: int, axis: int, x: Array) -> Array:
    """The i-th of so many equal runs along an axis."""
    size = x.shape[axis] // chunks
    return parallel.columns(lax.dynamic_slice_in_dim(x, i * size, size, axis), axis)


def _part(batch: Batch, i: Array | int, chunks: int) -> Batch:
    """The i-th of so many runs of neighbouring columns."""
    return _columns(batch, partial(_slice, i, chunks))


def _gathered_part(whole: Batch, columns: Array, batch: Batch, i: Array | int, chunks: int) -> Batch:
    """The i-th run of a `batch` that are the `columns` of `whole`; what is wide is gathered only now.

    Gathered all at once, the large observations of a minibatch would be written to memory and read again.
    """

    def pick(axis: int, gathered: Array, source: Array) -> Array:
        if math.prod(source.shape[2:]) < WIDE:
            return _slice(i, chunks, axis, gathered)
        return _take(_slice(i, chunks, 0, columns), axis, source)

    return _columns(batch, pick, whole)


def summed_gradient(
    loss: Callable[[Any, Any], tuple[Array, Metrics]],
    params: Tree,
    batch: Tree,
    chunks: int = 1,
    part: Callable[[Any, Array | int, int], Any] = _part,
) -> tuple[Tree, Metrics]:
    """The gradient of a loss and its additive metrics, summed over all devices.

    Summed also over `chunks` parts of the batch, taken one after the other, `part(batch, i, chunks)` being the i-th of
    them. Since the loss is a sum, the result is the same, and only what one part needs must be held at a time.
    """
    differentiate = _as_batch_of_one(jax.grad(loss, has_aux=True))
    if chunks == 1:
        return parallel.psum(differentiate(params, batch))

    @jax.jit  # traced once, for its shapes and for its code
    def of_chunk(i: Array) -> tuple[Tree, Metrics]:
        return differentiate(params, part(batch, i, chunks))

    def add(total: tuple[Tree, Metrics], i: Array) -> tuple[tuple[Tree, Metrics], None]:
        return jax.tree.map(jnp.add, total, of_chunk(i)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_chunk, jnp.zeros((), jnp.int32)))
    return parallel.psum(lax.scan(add, zeros, jnp.arange(chunks))[0])


def _num_chunks(num_columns: int, rows: int | None) -> int:
    """The fewest equal parts of at most `rows` columns."""
    if rows is None or num_columns <= rows:
        return 1
    return next(n for n in range(-(-num_columns // rows), num_columns + 1) if num_columns % n == 0)


def _as_batch_of_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function through a `vmap` over an axis of length one.

    It changes nothing but how XLA lays out the products: of a weight gradient it then transposes the factors in memory
    first, which on a CPU is worth 29% of a whole PPO loop (benchmarks/LOG.md).
    """

    def lifted(*arguments: Any) -> Any:
        stacked = jax.tree.map(lambda x: x[None], arguments)
        return jax.tree.map(lambda x: x[0], jax.vmap(function)(*stacked))

    return lifted


def apply(
    optimizer: optax.GradientTransformation,
    learning_rate: Array | float,
    gradient: Tree,
    params: Tree,
    opt_state: Tree,
) -> tuple[Any, Tree, Array]:
    """One step of the optimizer, whose updates point uphill; also the norm of the gradient."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
    return params, opt_state, jnp.linalg.norm(ravel_pytree(gradient)[0])


def _as_steps(batch: Batch) -> Batch:
    """`[T, B, ...]` as `[1, T*B, ...]`: for a policy without memory every step is a column of its own."""
    rollout = batch.rollout._replace(context=(), outcome=(), endings=())
    return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch._replace(rollout=rollout))

"""Orthogonal initial weights, and all of a learner's in one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace
from jax import lax

from jaxpg.types import Array, Key

LARGE = 2**20  # numbers of a matrix, from which on each is made by itself

Shape = tuple[int, ...]

_answer: ContextVar[Callable[[Key, Shape], Array] | None] = ContextVar("answer", default=None)
"""What makes the matrices that `orthogonal` is asked for, where `in_one_loop` does. Initialisers are called by flax,
which passes nothing else on to them."""


def orthogonal(gain: float) -> Callable[..., Array]:
    """Initial weights `[..., out]`: as a matrix, `gain` times one with orthonormal columns (or rows), uniformly drawn.

    Gram-Schmidt on a normal matrix, with every projection applied twice to limit rounding errors (Saxe et al. 2014,
    section 3). It replaces `jnp.linalg.qr`, which gives the same weights but can deadlock on a CPU: several of jaxlib's
    decompositions at once, as under `vmap` over seeds, each hold a thread of the pool that they wait for.
    """

    def weights(key: Key, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
        make = _answer.get() or _alone
        return gain * make(key, tuple(shape)).astype(dtype)

    return weights


def kernel(gain: float | None) -> Callable[..., Array]:
    """Initial weights of a layer: orthogonal with that gain, or flax's default if it is None."""
    return nn.initializers.lecun_normal() if gain is None else orthogonal(gain)


def in_one_loop(init: Callable[..., Any], *keys: Key) -> Any:
    """`init(*keys)`, with all its orthogonal weights made by one loop, for compile time alone.

    It replaces a loop for every matrix, of which XLA compiles each: compiling PPO in a `jax.jit` of one's own takes
    0.86 of the time on a CPU (benchmarks/LOG.md, "initial weights in one loop"). `init` is called twice, first to see
    which matrices it asks for. One that is asked for inside of another transformation, such as a `jax.jit` of the
    network's own, is made there. The weights are those of a loop each to rounding: one of jax's random numbers depends
    on its key and its index alone (with `jax_threefry_partitionable`, jax's default; else they are other draws).
    """
    trace, asked_for = current_trace(), list[tuple[Key, Shape]]()

    def take_note(key: Key, shape: Shape) -> Array:
        asked_for.append((key, shape))
        return jnp.zeros(shape)

    def here(make: Callable[[Key, Shape], Array]) -> Callable[[Key, Shape], Array]:
        return lambda key, shape: (make if current_trace() == trace else _alone)(key, shape)

    with _answered_by(here(take_note)):
        result = init(*map(jax.random.clone, keys))  # for `jax_debug_key_reuse`, which counts both calls
    if not asked_for:
        return result
    made = iter(_orthonormal(*zip(*asked_for, strict=True)))
    with _answered_by(here(lambda key, shape: next(made))):
        return init(*keys)


@contextmanager
def _answered_by(answer: Callable[[Key, Shape], Array]) -> Iterator[None]:
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def _alone(key: Key, shape: Shape) -> Array:
    return _orthonormal((key,), (shape,))[0]


@partial(jax.jit, static_argnums=1)  # traced once per shape: flax asks for the shape at every call of a layer
def _orthonormal(keys: tuple[Key, ...], shapes: tuple[Shape, ...]) -> list[Array]:
    """An orthonormal matrix of each key in its shape `[..., out]`: small ones by one loop, filled up to one size."""
    sizes = [_tall(shape) for shape in shapes]
    rows, columns = (max(size[i] for size in sizes) for i in (0, 1))
    if len(keys) > 1 and rows * columns >= LARGE:
        return [_alone(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    stacked_keys = jax.random.clone(jnp.stack(keys))  # `jax_debug_key_reuse` takes stacking for a use of them
    numbers = jax.vmap(lambda key: jax.random.normal(key, (rows * columns,)))(stacked_keys)

    def filled_up(size: tuple[int, int], numbers: Array) -> Array:
        normal = numbers[: math.prod(size)].reshape(size)
        return jnp.pad(normal, [(0, rows - size[0]), (0, columns - size[1])])

    def cut(shape: Shape, size: tuple[int, int], q: Array) -> Array:
        q = q[: size[0], : size[1]]
        return (q if math.prod(shape[:-1]) >= shape[-1] else q.T).reshape(shape)

    stacked = jnp.stack([filled_up(*x) for x in zip(sizes, numbers, strict=True)])
    return [cut(*x) for x in zip(shapes, sizes, jax.vmap(_gram_schmidt)(stacked), strict=True)]


def _tall(shape: Shape) -> tuple[int, int]:
    """Rows and columns of weights as a matrix, or of its transpose, with at least as many rows as columns."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return max(rows, columns), min(rows, columns)


def _gram_schmidt(normal: Array) -> Array:
    """Orthonormal columns in place of the columns of a tall matrix; columns of zeros stay as they are."""

    def add_column(i: Array, q: Array) -> Array:
        column = lax.dynamic_index_in_dim(normal, i, axis=1, keepdims=False)
        for _ in range(2):
            column -= q @ (q.T @ column)
        return q.at[:, i].set(column / jnp.maximum(jnp.linalg.norm(column), jnp.finfo(column.dtype).tiny))

    return lax.fori_loop(0, normal.shape[1], add_column, jnp.zeros_like(normal))

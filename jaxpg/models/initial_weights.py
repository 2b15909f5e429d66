"""Orthogonal initial weights, and all of a learner's in one loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace
from jax import lax

from jaxpg.types import Array, Key

LARGE = 2**20  # numbers of a matrix, from which on each is made by itself


class _Matrix(NamedTuple):
    """An orthonormal matrix to make: its key, and the shape `[..., out]` of the weights."""

    key: Key
    shape: tuple[int, ...]

    @property
    def tall(self) -> tuple[int, int]:
        """Rows and columns of the weights as a matrix, or of its transpose, with at least as many rows as columns."""
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        return max(rows, columns), min(rows, columns)


_answer: ContextVar[Callable[[_Matrix], Array] | None] = ContextVar("answer", default=None)


def orthogonal(gain: float) -> Callable[..., Array]:
    """Initial weights `[..., out]`: as a matrix, `gain` times one with orthonormal columns (or rows), uniformly drawn.

    Gram-Schmidt on a normal matrix, with every projection applied twice to limit rounding errors (Saxe et al. 2014,
    section 3). It replaces `jnp.linalg.qr`, which gives the same weights but can deadlock on a CPU: several of jaxlib's
    decompositions at once, as under `vmap` over seeds, each hold a thread of the pool that they wait for.
    """

    def weights(key: Key, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
        matrix, answer = _Matrix(key, tuple(shape)), _answer.get()
        return gain * (answer(matrix) if answer else _orthonormal([matrix])[0]).astype(dtype)

    return weights


def kernel(gain: float | None) -> Callable[..., Array]:
    """Initial weights of a layer: orthogonal with that gain, or flax's default if it is None."""
    return nn.initializers.lecun_normal() if gain is None else orthogonal(gain)


def in_one_loop(init: Callable[[], Any]) -> Any:
    """`init()`, with all its orthogonal weights made by one loop, for compile time alone.

    It replaces a loop for every matrix, of which XLA compiles each: a quarter of what compiling PPO in a `jax.jit` of
    one's own took on a CPU (benchmarks/LOG.md, "initial weights in one loop"). `init` is traced twice, first to see
    which matrices it asks for. One that is asked for inside of another transformation, such as a `jax.jit` of the
    network's own, is made there.
    """
    trace, asked = current_trace(), list[_Matrix]()

    def take_note(matrix: _Matrix) -> Array:
        if current_trace() != trace:
            return _orthonormal([matrix])[0]
        asked.append(matrix)
        return jnp.zeros(matrix.shape)

    with _answered_by(take_note):
        result = init()
    if len(asked) < 2:
        return result if not asked else init()
    made = iter(_orthonormal(asked))
    with _answered_by(lambda matrix: next(made) if current_trace() == trace else _orthonormal([matrix])[0]):
        return init()


@contextmanager
def _answered_by(answer: Callable[[_Matrix], Array]) -> Any:
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def _orthonormal(matrices: Sequence[_Matrix]) -> list[Array]:
    """The matrices that are asked for, in their shapes: small ones together, filled up with zeros to one size."""
    size = tuple(max(m.tall[i] for m in matrices) for i in (0, 1))
    if len(matrices) > 1 and math.prod(size) >= LARGE:
        return [made for matrix in matrices for made in _orthonormal([matrix])]
    keys = jnp.stack([m.key for m in matrices])
    numbers = jax.vmap(lambda key: jax.random.normal(key, (math.prod(size),)))(keys)

    def filled_up(matrix: _Matrix, numbers: Array) -> Array:
        normal = numbers[: math.prod(matrix.tall)].reshape(matrix.tall)
        return jnp.pad(normal, [(0, most - own) for most, own in zip(size, matrix.tall, strict=True)])

    stacked = jnp.stack([filled_up(m, x) for m, x in zip(matrices, numbers, strict=True)])

    def cut(matrix: _Matrix, q: Array) -> Array:
        q = q[: matrix.tall[0], : matrix.tall[1]]
        return (q if math.prod(matrix.shape[:-1]) >= matrix.shape[-1] else q.T).reshape(matrix.shape)

    return [cut(m, q) for m, q in zip(matrices, jax.vmap(_gram_schmidt)(stacked), strict=True)]


@jax.jit  # traced once per shape
def _gram_schmidt(normal: Array) -> Array:
    """Orthonormal columns in place of the columns of a tall matrix; columns of zeros stay as they are."""

    def add_column(i: Array, q: Array) -> Array:
        column = lax.dynamic_index_in_dim(normal, i, axis=1, keepdims=False)
        for _ in range(2):
            column -= q @ (q.T @ column)
        return q.at[:, i].set(column / jnp.maximum(jnp.linalg.norm(column), jnp.finfo(column.dtype).tiny))

    return lax.fori_loop(0, normal.shape[1], add_column, jnp.zeros_like(normal))

"""Compiled programs whose large arrays are arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.sharding import Mesh

from jaxpg import parallel

LARGE_CONSTANT = 2**20
"""Bytes from which on a constant of a program becomes an argument; smaller ones XLA may fold into what uses them."""


class Program:
    """`jax.jit(function)`, in which large arrays that the function closes over are arguments, not constants.

    The records of a data set are such arrays: the functions of an `Env` close over them. It replaces `jax.jit` on every
    platform. As constants they would be a part of every compiled program, in text and in memory; as arguments, 25 MB of
    records take 84 MB less (benchmarks/LOG.md, 2026-11-22, data as arguments). A program without large arrays is
    exactly `jax.jit(function)`.

    The shapes of the arguments are those of the first call, or of the first `lower`.

    Args:
        function: what is compiled.
        mesh: the devices that hold the arrays, each all of them; None for the default device.
        donate: the index of an argument whose buffers are donated.
        **options: of `jax.jit`.
    """

    def __init__(
        self, function: Callable[..., Any], mesh: Mesh | None = None, *, donate: int | None = None, **options: Any
    ) -> None:
        self._function, self._mesh, self._donate, self._options = function, mesh, donate, options
        self._program: Any = None
        self._constants: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        self._trace(arguments)
        return self._program(*self._constants, *arguments)

    def trace(self, *arguments: Any) -> Any:
        """As `jax.jit(function).trace`."""
        self._trace(arguments)
        return self._program.trace(*self._constants, *arguments)

    def lower(self, *arguments: Any) -> Any:
        """As `jax.jit(function).lower`."""
        self._trace(arguments)
        return self._program.lower(*self._constants, *arguments)

    def _trace(self, arguments: tuple[Any, ...]) -> None:
        if self._program is not None:
            return
        self._program = self._jit(self._function, first=0)
        traced = self._program.trace(*arguments)
        constants = [np.asarray(x) if _is_large(x) else x for x in traced.jaxpr.consts]
        large = [i for i, x in enumerate(traced.jaxpr.consts) if _is_large(x)]
        if not large:
            return

        def with_constants(*given: Any) -> Any:
            every = list(constants)
            for i, x in zip(large, given[: len(large)], strict=True):
                every[i] = x
            closed = jax.extend.core.ClosedJaxpr(traced.jaxpr.jaxpr, every)
            return _as_function(closed, traced.out_info)(*given[len(large) :])

        self._program = self._jit(with_constants, first=len(large))
        self._constants = tuple(self._placed(constants[i]) for i in large)

    def _jit(self, function: Callable[..., Any], *, first: int) -> Any:
        """`function` compiled; `first` is the index of the first argument that is not a constant."""
        donated = () if self._donate is None else (first + self._donate,)
        return jax.jit(function, donate_argnums=donated, **self._options)

    def _placed(self, constant: np.ndarray) -> Any:
        return constant if self._mesh is None else parallel.place(constant, parallel.REPLICATED, self._mesh)


def traced_once(function: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], Any]:
    """`function` for arguments of these shapes, and the shapes of its results, at the cost of a single trace.

    It replaces `jax.jit(function, inline=True)`. Arrays that it closes over are constants of the program around it, as
    `Program` wants them; from jax 0.11 on an inlined `jit` keeps them to itself.
    """
    jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return _as_function(jaxpr, results), results


def _as_function(jaxpr: jax.extend.core.ClosedJaxpr, results: Any) -> Callable[..., Any]:
    """What was traced, as a function of trees whose results are a tree like `results`."""

    def function(*arguments: Any) -> Any:
        leaves = jax.extend.core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return function


def _is_large(constant: Any) -> bool:
    return getattr(constant, "nbytes", 0) >= LARGE_CONSTANT

"""Steps on the host inside a compiled program, and what becomes of their failures.

A callback that raises takes the whole process with it where devices wait for each other, and else surfaces as one of
several exceptions with a traceback for a message. So none raises: a step that fails answers with NaN, and the reason is
kept for whoever started the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpg.types import Array, Tree

WIDTH = 8
"""Columns per piece of an argument.

XLA copies arguments above 100 kB in a thread of the pool that computes, and on a CPU with several devices all of them
may be waiting for this one, for ever. Pieces so narrow stay below that for batches of up to 3,000 rows per device.
"""
_failures: list[Exception] = []


def call(function: Callable[..., tuple[np.ndarray, ...]], results: Tree, rows: Array, *scalars: Array) -> Tree:
    """What a Python function says of an array `[T]` and of scalars, with one call for a whole batch of them.

    Args:
        function: numpy arrays `[..., T]` and `[...]`, with equal leading axes -> arrays `[...]`, as many as results.
        results: the shapes and dtypes of what it returns, without the leading axes.
        rows: [T]
        *scalars: [] each.

    Returns:
        As `results`: what the function returned, or where it raised NaN and -1; then `raise_failure` has the reason.
    """

    def step(pieces: list[Any], *scalars: Any) -> Tree:
        arrays = [np.asarray(x) for x in scalars]
        try:
            return function(np.concatenate([np.asarray(piece) for piece in pieces], -1), *arrays)
        except Exception as error:
            _failures.append(error)
            return jax.tree.map(lambda x: np.full(arrays[0].shape, _failure_value(x.dtype), x.dtype), results)

    pieces = [rows[i : i + WIDTH] for i in range(0, len(rows), WIDTH)]
    return jax.pure_callback(step, results, pieces, *scalars, vmap_method="broadcast_all")


def _failure_value(dtype: np.dtype) -> float:
    return np.nan if np.issubdtype(dtype, np.floating) else -1


def clear_failures() -> None:
    """Begin anew: what failed before is of no interest."""
    _failures.clear()


def raise_failure() -> None:
    """Raise what the first step that failed since `clear_failures` raised, if any did."""
    if _failures:
        raise _failures[0]

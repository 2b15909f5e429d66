"""Python functions called from inside a compiled program, on every platform, and how their failures are reported.

`call` replaces plain `jax.pure_callback`. An exception inside such a callback kills the process if devices wait for
each other, and otherwise surfaces as one of several exceptions with a long traceback. So does Ctrl-C, which Python
raises wherever the main thread is, inside of a callback too. So no callback raises, whatever the exception: a call that
fails returns NaN or -1, its exception is stored, and the code that started the program raises it (`raise_failure`).
The first is logged as well, since a loop of one's own may not ask.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

from jaxpg.parallel.machine import machine
from jaxpg.types import Array, Tree

PIECE_COLUMNS = 8
"""Columns per piece of an array argument, for CPUs with several XLA devices.

XLA copies arguments above 100 kB in a thread of the pool that computes. All its threads may be waiting for this call,
which then never returns. Pieces of 8 columns stay below that size for batches of up to 3,000 rows per device.
"""
_failures: list[BaseException] = []
_log = logging.getLogger(__name__)
_of_thread = threading.local()


def call(function: Callable[..., tuple[np.ndarray, ...]], results: Tree, rows: Array, *scalars: Array) -> Tree:
    """Call a Python function on an array `[T]` and scalars; under `vmap` once for the whole batch.

    Args:
        function: numpy arrays `[..., T]` and `[...]`, with equal leading axes -> arrays `[...]`, as many as `results`.
        results: shapes and dtypes of what it returns, without the leading axes.
        rows: [T]
        *scalars: [] each.

    Returns:
        Arrays as in `results`. Where the function raised: NaN, and -1 for integers; `raise_failure` raises the reason.
    """

    def call_on_host(pieces: list[Any], *scalars: Any) -> Tree:
        arrays = [np.asarray(x) for x in scalars]
        try:
            return function(np.concatenate([np.asarray(piece) for piece in pieces], -1), *arrays)
        except BaseException as error:
            fail(error)
            return jax.tree.map(lambda x: np.full(arrays[0].shape, _failure_value(x.dtype), x.dtype), results)

    pieces = [rows[i : i + PIECE_COLUMNS] for i in range(0, len(rows), PIECE_COLUMNS)]
    return jax.pure_callback(call_on_host, results, pieces, *scalars, vmap_method="broadcast_all")


def call_in_place(
    function: Callable[..., tuple[np.ndarray, ...]], results: tuple[jax.ShapeDtypeStruct, ...], *arguments: Array
) -> Any:
    """Call a Python function that changes something on the host, at every step of a loop; under `vmap` once for all.

    On a CPU the function reads the buffers of the program and its results are written into them, which replaces
    `jax.pure_callback` and its copies (`Machine.calls_in_place`). Elsewhere it is `jax.pure_callback`. Calls happen in
    the order of their data: what one must see done has to read a result of the other.

    Args:
        function: arrays with equal leading axes -> a tuple of arrays with these leading axes. It gets what `np.asarray`
            makes an array of, at a microsecond each, and must not keep it.
        results: shapes and dtypes of what it returns, without the leading axes.
        *arguments: arrays.

    Returns:
        Arrays as in `results`. Where the function raised, and in every call after it until `raise_failure` raises the
        reason: NaN, and -1 for integers.
    """

    def call_on_host(buffers: Sequence[Any], *arguments: Any) -> None:
        out = [np.asarray(x) for x in buffers]
        try:
            if not _failures:
                for buffer, value in zip(out, function(*arguments), strict=True):
                    buffer[...] = value
                return
        except BaseException as error:
            fail(error)
        for buffer in out:
            buffer[...] = _failure_value(buffer.dtype)

    if machine().calls_in_place:

        def call_with_buffers(context: Any, buffers: Sequence[Any], *arguments: Any) -> None:
            _keep_thread_state()
            call_on_host(buffers, *arguments)

        in_place = buffer_callback(call_with_buffers, results, has_side_effect=True, vmap_method="broadcast_all")
        return in_place(*arguments)
    rank = arguments[0].ndim  # axes beyond these are those of `vmap`

    def call_with_copies(*arguments: Any) -> Tree:
        batch = np.shape(arguments[0])[: np.ndim(arguments[0]) - rank]
        out = tuple(np.empty((*batch, *x.shape), x.dtype) for x in results)
        call_on_host(out, *arguments)
        return out

    return jax.pure_callback(call_with_copies, results, *arguments, vmap_method="broadcast_all")


def _keep_thread_state() -> None:
    """Let this thread keep what Python knows of it, from its first call on.

    It replaces nothing. A thread of XLA's has no state of Python's, so that each call makes one, with a stack of its
    own, and destroys it again: a call takes 6 to 20 us more, on a CPU (benchmarks/LOG.md, "the host door, threads that
    Python knows"). Taking the lock once more than it is given back, which is allowed in a thread that holds it, keeps
    the state until the process ends.
    """
    if not hasattr(_of_thread, "kept"):
        _of_thread.kept = ctypes.pythonapi.PyGILState_Ensure()


def _failure_value(dtype: np.dtype) -> float:
    return np.nan if np.issubdtype(dtype, np.floating) else -1


def clear_failures() -> None:
    """Forget all failures so far; call it before a program starts."""
    _failures.clear()


def fail(error: BaseException) -> None:
    """Let every call of `call_in_place` from now on fail, for this reason."""
    if not _failures and not isinstance(error, KeyboardInterrupt):
        _log.error("%s Results are NaN from here on. jaxpg.parallel.host_callback.raise_failure() raises this.", error)
    _failures.append(error)


def raise_failure() -> None:
    """Raise the exception of the first call that failed since `clear_failures`, if any did.

    It is then forgotten: calls of programs that start later are made again.
    """
    if _failures:
        first = _failures[0]
        _failures.clear()
        raise first

"""The memory that a training program needs on each device, and how much there is.

`least_bytes` is a lower bound that takes no compiling; `memory_per_device` is XLA's own analysis of the compiled
program. Sweeps choose their wave size by them, and every run is refused by the bound if it cannot fit.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from jaxpg import parallel
from jaxpg.errors import UserError
from jaxpg.files import flatten
from jaxpg.training.advance import Programs, RunState, abstract_keys, abstract_state, compile_programs
from jaxpg.types import Learner
from jaxpg.vectorize import inner_jaxprs

_NOT_SIZES = ("total_steps", "anneal_steps", "evaluations", "seeds")
"""Numbers of a config that no array's shape depends on."""


def memory_limit(mesh: Mesh, gibibytes: float | None = None) -> float:
    """Bytes that each device may use: nine tenths of its memory, or its equal part of `gibibytes` if given.

    CPU devices have equal parts of the machine's memory.
    """
    if gibibytes is not None:
        return gibibytes * 2**30 / mesh.size
    stats = mesh.local_devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return 0.9 * stats["bytes_limit"]
    return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(mesh.local_devices)


def bytes_of(state: Any) -> int:
    """The bytes of arrays, or of their shapes and dtypes; a key counts as its numbers."""
    return sum(map(_bytes, jax.tree.leaves(state)))


def least_memory(learner: Learner, num_seeds: int, mesh: Mesh) -> int:
    """A lower bound of the bytes that training S seeds takes on each device (`least_bytes`); nothing is compiled."""
    keys, state = abstract_keys(num_seeds), abstract_state(learner, num_seeds)
    traced = compile_programs(learner, None, state, mesh).advance.trace(keys, state, np.int32(1))
    return max(bytes_of(state) // mesh.size, least_bytes(traced.jaxpr.jaxpr, mesh))


def memory_per_device(learner: Learner, num_seeds: int, mesh: Mesh, limit: float = math.inf) -> int:
    """Bytes that training S seeds takes on each device of the mesh, by XLA's analysis of the compiled program.

    A program that needs more than `limit` by `least_bytes` is not compiled; that bound is returned.
    """
    keys, state = abstract_keys(num_seeds), abstract_state(learner, num_seeds)
    if (least := bytes_of(state) // mesh.size) > limit:
        return least
    program = compile_programs(learner, None, state, mesh).advance
    arguments = parallel.abstract_arrays((keys, state), (parallel.PER_SEED, parallel.state_specs(state, mesh)), mesh)
    with _explain_overflow("num_envs and num_steps, or batch_size"):
        traced = program.trace(*arguments, np.int32(1))
    if (least := least_bytes(traced.jaxpr.jaxpr, mesh)) > limit:
        return least
    memory = traced.lower().compile().memory_analysis()
    arguments_and_results = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return arguments_and_results + memory.temp_size_in_bytes


def check_memory(
    programs: Programs, state: RunState, mesh: Mesh, config: Mapping[str, Any], *, evaluates: bool
) -> None:
    """Trace the programs of a run, and refuse a run that cannot fit its devices, before anything is compiled.

    The trace is kept by jax, so that the first call of a program does not trace again.

    Args:
        programs: of the run.
        state: shapes and dtypes of its state.
        mesh: the devices.
        config: its settings, to name the one that is too large.
        evaluates: whether `programs.evaluate` is of use.

    Raises:
        UserError: the program needs more memory than there is, or an axis of more than 2^31 - 1.
    """
    keys = abstract_keys(len(state.steps))
    largest = _largest_settings(config, len(state.steps))
    refuse_above_limit = partial(refuse_too_large, memory_limit(mesh), config=config, num_seeds=len(state.steps))
    refuse_above_limit(bytes_of(state) // mesh.size)
    with _explain_overflow(largest):
        refuse_above_limit(least_bytes(programs.advance.trace(keys, state, np.int32(1)).jaxpr.jaxpr, mesh))
        if evaluates:
            refuse_above_limit(least_bytes(programs.evaluate.trace(keys, state).jaxpr.jaxpr, mesh))


def refuse_too_large(limit: float, needed: int, *, config: Mapping[str, Any], num_seeds: int) -> None:
    """Raise a UserError, which names the largest sizes of a run, if it needs more bytes on a device than there are."""
    if needed > limit:
        raise UserError(
            f"This run needs at least {needed / 2**30:,.3g} GiB on each device, and there are {limit / 2**30:,.3g}. "
            f"Its largest sizes are {_largest_settings(config, num_seeds)}: make them smaller."
        )


@contextlib.contextmanager
def _explain_overflow(largest: str) -> Iterator[None]:
    """Tracing indexes axes by int32: longer ones are an error of jax, or a warning on the way to too many bytes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype int64 requested in convert_element_type")
        try:
            yield
        except OverflowError as error:
            raise UserError(
                "An array of this run would have more than 2^31 - 1 entries along an axis. Its largest sizes are "
                f"{largest}: make them smaller."
            ) from error


@contextlib.contextmanager
def explain_exhaustion(config: Mapping[str, Any], num_seeds: int) -> Iterator[None]:
    """Turn the error of a device without memory left into a UserError that names the largest sizes of a run.

    `check_memory` refuses by a lower bound, so a run that passes it may still be too large.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            "A device has run out of memory. Make the largest sizes of this run smaller: "
            f"{_largest_settings(config, num_seeds)}."
        ) from error


def least_bytes(jaxpr: core.Jaxpr, mesh: Mesh) -> int:
    """A lower bound of the bytes that a program takes on each device: the results of its largest loop.

    What a loop carries and what it stacks up, such as the steps of a rollout, is all in memory when it ends, whatever
    XLA fuses. Where shapes are those of the whole mesh, a device may hold as little as its equal part.
    """
    return max(_loop_bytes(jaxpr, mesh.size), default=0)


def _loop_bytes(jaxpr: core.Jaxpr, devices: int) -> Iterator[int]:
    """The bytes per device of what every loop of a program returns, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("scan", "while"):
            yield sum(_bytes(x.aval) for x in equation.outvars) // devices
        per_device = equation.primitive.name == "shard_map"  # inside of it, shapes are those of one device
        for inner in inner_jaxprs(equation):
            yield from _loop_bytes(inner, 1 if per_device else devices)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _largest_settings(config: Mapping[str, Any], num_seeds: int) -> str:
    """The three largest numbers of a config by which arrays are sized, "num_envs = 100,000"."""
    sizes = {"seeds": num_seeds}
    for name, value in flatten(config).items():
        numbers = [x for x in (value if isinstance(value, list | tuple) else [value]) if type(x) is int]
        if numbers and name.split(".")[-1] not in _NOT_SIZES:
            sizes[name.split(".")[-1]] = max(numbers)
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return ", ".join(f"{name} = {sizes[name]:,}" for name in largest)

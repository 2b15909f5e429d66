"""The compiled programs of a run: they create the states of its seeds, advance them, and evaluate them.

The state of a seed after i iterations depends on its number and on i alone: not on the other seeds, not on where chunks
end, not on whether the run was interrupted in between. So resuming is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from jaxpg import parallel
from jaxpg.parallel.machine import compiler_options, program_for
from jaxpg.rollout.metrics import OF_ENV
from jaxpg.training.program import Program, traced_once
from jaxpg.types import Array, Key, Learner, Metrics, Tree

MEAN_OVER = {"return": "episodes", "length": "episodes", "length_correct": "correct", "length_incorrect": "incorrect"}
"""Metrics that are means over what another metric counts, NaN where the count is 0."""
COUNTS = tuple(dict.fromkeys(MEAN_OVER.values()))


def counted_by(name: str) -> str | None:
    """The metric that counts what this one is a mean over, None for a mean over iterations."""
    return "episodes" if name.startswith(OF_ENV) else MEAN_OVER.get(name)


class RunState(NamedTuple):
    """The state of a run of S seeds; every leaf has a leading axis `[S]`.

    learner: the learner's state.
    iteration: [S] int32, iterations done.
    steps: [S] int32, environment steps consumed.
    """

    learner: Tree
    iteration: Array
    steps: Array


class SeedKeys(NamedTuple):
    """The randomness of one seed, by purpose."""

    init: Key
    run: Key
    evaluation: Key


def seed_keys(seed: int | Array) -> SeedKeys:
    """The keys of a seed. They depend on its number alone, not on the other seeds."""
    return SeedKeys(*jax.random.split(jax.random.key(seed), 3))


def init_seeds(learner: Learner, keys: Key) -> RunState:
    """The seeds before their first iteration; `keys` is `[S]`.

    One after the other on every platform: `vmap` would take twice as long to compile, and this runs once.
    """
    zeros = jnp.zeros(keys.shape, jnp.int32)
    return strongly_typed(RunState(lax.map(learner.init, keys), zeros, zeros))


def strongly_typed(state: Tree) -> Tree:
    """Arrays as those of a checkpoint and of several processes are: the types decide what is compiled."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype) if x.weak_type else x, state)


def compile_init(learner: Learner, shardings: Tree = None) -> Callable[[Key], RunState]:
    """`init_seeds` as a compiled program; with `shardings`, every array is created on the devices that hold it."""
    options = compiler_options(runs_once=True)
    return Program(partial(init_seeds, learner), out_shardings=shardings, compiler_options=options)


def advance_seeds(learner: Learner, keys: Key, state: RunState, target: Array | int) -> tuple[RunState, Metrics]:
    """Let every seed iterate until it has consumed `target` environment steps, or until a metric is not finite.

    The number of iterations may depend on the data, hence a while loop; a seed that has reached `target` is unchanged.
    Iteration i of a seed draws from `fold_in(key, i)`.

    Args:
        learner: what is trained.
        keys: [S], the `run` keys of the seeds.
        state: of S seeds.
        target: environment steps of a seed since its first iteration.

    Returns:
        The state, and metrics `[S]` over the `iterations` of each seed in this call. Those for which `counted_by` gives
        a metric are means over it, NaN where it is 0; those in COUNTS are sums; `steps` and `iteration` are the last;
        all others are means over iterations.
    """
    return parallel.map_seeds(partial(_advance_one, learner, target))(keys, state)


def _advance_one(learner: Learner, target: Array | int, key: Key, state: RunState) -> tuple[RunState, Metrics]:
    """`advance_seeds` of a single seed, without the axis `[S]`."""
    step, (_, metrics) = traced_once(learner.step, state.learner, key)

    def iterate(carry: tuple[RunState, Array]) -> tuple[RunState, Array]:
        state, sums = carry
        learner_state, metrics = step(state.learner, jax.random.fold_in(key, state.iteration))
        end = RunState(learner_state, state.iteration + 1, metrics["steps"].astype(jnp.int32))
        return end, sums + ravel_pytree(_times_counts(metrics))[0]

    def unfinished(carry: tuple[RunState, Array]) -> Array:
        state, sums = carry
        return (state.steps < target) & jnp.isfinite(sums.sum())

    # As one vector: an operation per metric is twenty kernels of an update on a GPU.
    zeros, unravel = ravel_pytree({name: jnp.zeros(x.shape, jnp.float32) for name, x in metrics.items()})
    end, vector = lax.while_loop(unfinished, iterate, (state, zeros))
    sums = unravel(vector)
    iterations = end.iteration - state.iteration
    means = {n: x / (sums[count] if (count := counted_by(n)) else iterations.astype(x.dtype)) for n, x in sums.items()}
    counts = {n: sums[n] for n in COUNTS if n in sums}
    progress = {"steps": end.steps, "iteration": end.iteration, "iterations": iterations}
    return end, means | counts | progress


def _times_counts(metrics: Metrics) -> Metrics:
    """The terms summed over iterations: one that a metric counts times that, 0 where it is 0; others as they are."""

    def total(value: Array, count: Array) -> Array:
        return jnp.where(count > 0, value * count, 0.0)

    counts = {name: counted_by(name) for name in metrics}
    return {name: total(x, metrics[count]) if (count := counts[name]) else x for name, x in metrics.items()}


class Programs(NamedTuple):
    """The compiled programs of a run, for all seeds on the devices of its mesh.

    advance: keys `[S]`, state, target -> state, metrics; see `advance_seeds`. The state passed in is donated.
    evaluate: keys `[S]`, state -> metrics named `evaluation_...`; iteration i draws from `fold_in(key, i)`.
    """

    advance: Any
    evaluate: Any


def compile_programs(
    learner: Learner, evaluate: Callable[[Any, Key], Metrics] | None, state: RunState, mesh: Mesh
) -> Programs:
    """The programs of a run; without `evaluate` the second must not be called. Each compiles at its first call.

    Args:
        learner: what is trained.
        evaluate: a learner's state and a key -> metrics.
        state: arrays of S seeds, or their shapes and dtypes.
        mesh: what they run on.
    """
    seeds, specs = parallel.PER_SEED, parallel.state_specs(state, mesh)

    def evaluate_one(key: Key, state: RunState) -> dict[str, Array]:
        assert evaluate is not None  # else this is never called
        with parallel.collectives.each_alone():
            metrics = evaluate(state.learner, jax.random.fold_in(key, state.iteration))
        return {f"evaluation_{name}": value for name, value in metrics.items()}

    advance_all = parallel.spread(
        partial(advance_seeds, learner), mesh, in_specs=(seeds, specs, parallel.REPLICATED), out_specs=(specs, seeds)
    )
    evaluate_all = parallel.spread(parallel.map_seeds(evaluate_one), mesh, in_specs=(seeds, specs), out_specs=seeds)
    with program_for(parallel.platform_of(mesh)):
        options = compiler_options()
    return Programs(
        advance=Program(advance_all, mesh, donate=1, compiler_options=options),
        evaluate=Program(evaluate_all, mesh, compiler_options=options),
    )


def abstract_state(learner: Learner, num_seeds: int) -> RunState:
    """Shapes and dtypes of the state of S seeds."""
    return jax.eval_shape(partial(init_seeds, learner), abstract_keys(num_seeds))


def abstract_keys(num_seeds: int) -> Key:
    """Shapes and dtypes of the keys of S seeds."""
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_seeds))

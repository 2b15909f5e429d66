"""Programs that advance seeds: keys, states, and one compiled loop of iterations per seed.

Where a seed stands after i iterations depends on its number and on i alone: not on the other seeds, not on where chunks
were cut, not on whether the run was interrupted in between. So resuming is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxpg import parallel
from jaxpg.types import Array, Key, Learner, Metrics, Tree

MEAN_OVER = {"return": "episodes", "length": "episodes", "length_correct": "correct", "length_incorrect": "incorrect"}
"""Metrics that are means over what another metric counts, NaN where that is 0; all others are means over iterations."""
COUNTS = tuple(dict.fromkeys(MEAN_OVER.values()))


class RunState(NamedTuple):
    """Where a run of S seeds stands; every leaf has a leading axis `[S]`.

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
    """The keys of a seed, the same whichever other seeds run beside it."""
    return SeedKeys(*jax.random.split(jax.random.key(seed), 3))


def init_seeds(learner: Learner, keys: Key) -> RunState:
    """The seeds before their first iteration; `keys` is `[S]`."""
    zeros = jnp.zeros(keys.shape, jnp.int32)
    return RunState(lax.map(learner.init, keys), zeros, zeros)  # vmap would take twice as long to compile


def compile_init(learner: Learner, shardings: Tree = None) -> Callable[[Key], RunState]:
    """`init_seeds` as a program that runs once, so a CPU compiles it without optimisation."""
    return jax.jit(
        partial(init_seeds, learner), out_shardings=shardings, compiler_options=compiler_options(runs_once=True)
    )


def compiler_options(*, runs_once: bool = False) -> dict[str, int | bool]:
    """What XLA may spend on a program for a CPU: no more than pays (benchmarks/LOG.md).

    LLVM's optimisation at level 1 takes a fifth less time than at XLA's own 3 and gives programs as fast; at level 0 it
    takes least and gives slow ones. jax 0.10 can also do without fused kernels, which later versions can not.
    """
    if jax.default_backend() != "cpu":
        return {}
    unfused = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return {"xla_backend_optimization_level": 0, **unfused} if runs_once else {"xla_backend_optimization_level": 1}


def advance(learner: Learner, keys: Key, state: RunState, target: Array | int) -> tuple[RunState, Metrics]:
    """Let every seed iterate until it has consumed `target` environment steps, or until a metric is not finite.

    How many iterations that takes may depend on the data, hence a while loop; a seed that is there stands still.
    Iteration i of a seed draws from `fold_in(key, i)`.

    Returns:
        The state, and metrics `[S]`: means over a seed's `iterations` in this call (those of MEAN_OVER over
        what it says, NaN where there was none; of COUNTS the sum, of `steps` the last).
    """
    return parallel.map_seeds(partial(_advance_one, learner, target))(keys, state)


def _advance_one(learner: Learner, target: Array | int, key: Key, state: RunState) -> tuple[RunState, Metrics]:
    """`advance` of a single seed, without the axis `[S]`."""
    step = jax.jit(learner.step)  # traced once, for its shapes and for its code

    def iterate(carry: tuple[RunState, Metrics]) -> tuple[RunState, Metrics]:
        state, sums = carry
        learner_state, metrics = step(state.learner, jax.random.fold_in(key, state.iteration))
        end = RunState(learner_state, state.iteration + 1, metrics["steps"].astype(jnp.int32))
        return end, jax.tree.map(jnp.add, sums, _weighted(metrics))

    def unfinished(carry: tuple[RunState, Metrics]) -> Array:
        state, sums = carry
        return (state.steps < target) & jnp.isfinite(sum(sums.values()))

    metrics = jax.eval_shape(step, state.learner, key)[1]
    sums = {name: jnp.zeros(x.shape, jnp.float32) for name, x in metrics.items()}
    end, sums = lax.while_loop(unfinished, iterate, (state, sums))
    iterations = end.iteration - state.iteration
    means = {n: x / (sums[MEAN_OVER[n]] if n in MEAN_OVER else iterations.astype(x.dtype)) for n, x in sums.items()}
    totals = {n: sums[n] for n in COUNTS if n in sums}
    counts = {"steps": end.steps, "iteration": end.iteration, "iterations": iterations}
    return end, means | totals | counts


def abstract_state(learner: Learner, num_seeds: int) -> RunState:
    """Shapes and dtypes of the state of so many seeds."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_seeds))
    return jax.eval_shape(partial(init_seeds, learner), keys)


def memory_per_device(learner: Learner, num_seeds: int, mesh: Mesh) -> int:
    """Bytes that the training of so many seeds takes on each device of the mesh, as the compiled program states it."""
    state = abstract_state(learner, num_seeds)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_seeds))
    chunk, _ = compile_programs(learner, None, state, mesh)
    arguments = parallel.abstract_arrays((keys, state), (parallel.PER_SEED, parallel.state_specs(state, mesh)), mesh)
    needed = chunk.lower(*arguments, np.int32(1)).compile().memory_analysis()
    given_and_made = needed.argument_size_in_bytes + needed.output_size_in_bytes - needed.alias_size_in_bytes
    return given_and_made + needed.temp_size_in_bytes


def compile_programs(
    learner: Learner, evaluate: Callable[[Any, Key], Metrics] | None, state: RunState, mesh: Mesh
) -> tuple[Any, Any]:
    """The functions that advance and evaluate all seeds on the devices of the mesh."""
    seeds, specs = parallel.PER_SEED, parallel.state_specs(state, mesh)

    def evaluation(key: Key, state: RunState) -> dict[str, Array]:
        assert evaluate is not None  # else this is never called
        metrics = evaluate(state.learner, jax.random.fold_in(key, state.iteration))
        return {f"evaluation_{name}": value for name, value in metrics.items()}

    advance_all = parallel.spread(
        partial(advance, learner), mesh, in_specs=(seeds, specs, parallel.REPLICATED), out_specs=(specs, seeds)
    )
    evaluate_all = parallel.spread(parallel.map_seeds(evaluation), mesh, in_specs=(seeds, specs), out_specs=seeds)
    options = compiler_options()
    return (
        jax.jit(advance_all, donate_argnums=1, compiler_options=options),
        jax.jit(evaluate_all, compiler_options=options),
    )


def _weighted(metrics: Metrics) -> Metrics:
    """What is summed over iterations: means over something times its number, all else as it is."""

    def total(name: str, value: Array) -> Array:
        count = metrics[MEAN_OVER[name]]
        return jnp.where(count > 0, value * count, 0.0)

    return {name: total(name, value) if name in MEAN_OVER else value for name, value in metrics.items()}
